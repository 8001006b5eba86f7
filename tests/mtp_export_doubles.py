# Stitched folders seen by somebody else: tiny targets in folders of their own, drafters for them, and the published
# computation of multi-token prediction read off a stitched folder alone, with none of our code in between.

import json
import re

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from drafters.checkpoint import save_drafter
from export.compressed import quantization_config, tensors_of
from export.quantize import quantize
from export.source import open_source
from tests.mtp_doubles import make_mtp
from tests.session_cases import Reader
from tests.test_mtp_target_block import TARGETS, target_of

SPELLED = ("deepseek_v3", "glm4_moe", "qwen3_next", "mimo")
# Settings that every engine runs as they were trained.
FITTING = {"reduced": False, "block": "target", "block_size": 1, "feedback": "after_norm"}


def order_of(name):
    return TARGETS.get(name, ({},))[-1].get("order", "embedding_first")


def save_target(target, folder, **saving):
    """The target in a folder of its own, as from the hub."""
    transformers.utils.logging.disable_progress_bar()
    target.model.save_pretrained(folder, **saving)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("what the target is")
    return folder


def source_of(target, tmp_path, *, target_folder, name="", **settings):
    """A random drafter for it, saved and opened to be exported."""
    drafter = make_mtp(target, **{**FITTING, "order": order_of(name), **settings})
    folder = save_drafter(drafter, tmp_path / "drafter", spec=target.spec)
    return open_source(folder, target_folder=target_folder, other_target=True)


def world_of(name, tmp_path, **settings):
    """A target, and a source to export."""
    target = target_of(name)
    folder = save_target(target, tmp_path / "target")
    return target, source_of(target, tmp_path, target_folder=folder, name=name, **settings)


def session_draft(drafter, target, text_T, at):
    """Drafts after the token `at` of a text, and the probabilities that each was drawn from."""
    reader = Reader(drafter, target, [text_T])
    reader.read([at])
    proposal = reader.propose(torch.linspace(0.1, 0.9, drafter.block_size)[None])
    return proposal.tokens_BS[0], proposal.probs_BSV[0]


class Published:
    """The module of a stitched folder as its family publishes the computation: a projection of the normed embedding of
    the next token and the normed state, one layer of the family, a norm, the target's output projection."""

    def __init__(self, folder, scratch):
        self.config = json.loads((folder / "config.json").read_text())
        self.files = {}
        for shard in folder.glob("*.safetensors"):
            self.files.update(load_file(shard))
        kind = self.config["model_type"]
        num_layers = self.config["num_hidden_layers"]
        if kind in ("deepseek_v3", "glm4_moe"):
            prefix, block = f"model.layers.{num_layers}.", ""
            names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        elif kind == "qwen3_next":
            prefix, block = "mtp.", "layers.0."
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        else:
            assert self.config["architectures"] == ["MiMoForCausalLM"]
            prefix, block = "model.mtp_layers.0.", ""
            names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        parts = [self.files[f"{prefix}{name}.weight"] for name in names]
        if kind == "qwen3_next":
            parts = [parts[0] + 1, parts[1] + 1, parts[2], parts[3] + 1]
        self.embedding_gain, self.state_gain, self.projection, self.final_gain = parts
        self.embedding_first = kind != "qwen2"
        self.model = self._longer(scratch, prefix + block, num_layers)
        self.layer = self.model.model.layers[num_layers]

    def _longer(self, scratch, prefix, num_layers):
        """The target with the module's block as one more layer at its end, loaded by transformers."""
        renamed = {}
        for name, tensor in self.files.items():
            if name.startswith(prefix):
                name = f"model.layers.{num_layers}.{name.removeprefix(prefix)}"
            renamed[name] = tensor
        config = {**self.config, "num_hidden_layers": num_layers + 1}
        if config.get("layer_types"):
            config["layer_types"] = [*config["layer_types"], "full_attention"]
        scratch.mkdir()
        save_file(renamed, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(config))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            scratch, attn_implementation="eager", dtype=torch.float32
        )
        return model.eval()

    @torch.inference_mode()
    def logits(self, text_T, drafts_K, states_TD):
        """Logits [K, V] of the drafts after a text, whose tokens but the last have the target's `states_TD` (after its
        final norm): depth k reads the token k places after a state's, and the normed output of the depth before."""
        tokens_T, length, found = torch.cat([text_T, drafts_K]), len(states_TD), []
        for k in range(1, len(drafts_K) + 1):
            embedded_TD = F.embedding(tokens_T[k : k + length], self.files["model.embed_tokens.weight"])
            halves = [self.norm(embedded_TD, self.embedding_gain), self.norm(states_TD, self.state_gain)]
            if not self.embedding_first:
                halves.reverse()
            output_TD = self.block(torch.cat(halves, dim=-1) @ self.projection.T)
            states_TD = self.norm(output_TD, self.final_gain)
            found.append(states_TD[-1] @ self.files["lm_head.weight"].T)
        return torch.stack(found)

    def norm(self, x, gain):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * gain

    def block(self, x_TD):
        positions = torch.arange(len(x_TD))[None]
        mask = torch.full((len(x_TD), len(x_TD)), torch.finfo(torch.float32).min).triu(1)[None, None]
        rotary = self.model.model.rotary_emb(x_TD[None], positions)
        out = self.layer(x_TD[None], attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return (out[0] if isinstance(out, tuple) else out)[0]


def quantized_folder(folder, out, scheme, *, floats=(r"mlp\.gate$",)):
    """A quantized copy of a target's folder: the projections of its layers but those that `floats` name."""
    tensors = load_file(folder / "model.safetensors")
    stored = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        is_projection = re.search(r"layers\.\d+\..*_proj(_with_mqa)?\.weight$", name)
        if is_projection and not any(re.search(pattern, module) for pattern in floats):
            stored.update(tensors_of(module, quantize(tensor, scheme, name=name), torch.bfloat16))
        else:
            stored[name] = tensor if name.endswith("correction_bias") else tensor.bfloat16()
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    ignore = [*(f"re:.*{pattern}" for pattern in floats), "re:.*lm_head$"]
    config["quantization_config"] = quantization_config(scheme, ignore=ignore)
    out.mkdir()
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return out


def is_ignored(config, name):
    """Whether an engine takes the module that it calls `name` for a float one (compressed-tensors)."""
    entries = config["quantization_config"]["ignore"]
    return any(re.match(e[3:], name) if e.startswith("re:") else e == name for e in entries)
