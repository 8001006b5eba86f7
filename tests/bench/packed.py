# Drafting from a packed block against drafting from floats, on a trained drafter; contestants take turns, medians:
#     python -m tests.bench.packed kernels
#     python -m tests.bench.packed drafts --run outputs/markov-smollm2 [--rounds 100]
#     python -m tests.bench.packed decode --run outputs/markov-smollm2 --prompts a.jsonl b.jsonl [--each 8] [--batch 1]
# Between two drafts the target runs, so that weights are read as they are in decoding.

import argparse
import random
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from data.prompts import PromptConfig, prompt_encoder, source_prompts
from data.sources import SourceConfig
from drafters.checkpoint import load_drafter, save_drafter
from drafters.contestants import find_entries, target_node
from drafters.decoding.loop import DecodeConfig
from drafters.decoding.runner import Execution
from drafters.decoding.sampling import Draws
from drafters.door import load_target
from drafters.packed.block import Block, block_size
from drafters.packed.products import quantize_rows
from drafters.types import Sampling
from drafters.weights import resolve
from export import to_packed
from export.kept import measure_kept
from export.quantize import dequantize, is_quantized, quantize, scheme_of
from export.source import open_source

# Rows of input and shape [N, K] of each product of a draft of the default markov drafter.
PRODUCTS = {
    "fc": (2, 576, 2880),
    "kv": (2, 768, 576),
    "qkv": (5, 960, 576),
    "o": (5, 576, 576),
    "gate_up": (5, 3072, 576),
    "down": (5, 576, 1536),
    "head": (5, 8192, 576),
    "w2": (1, 8192, 64),
}
MEMORY = 48 << 20  # bytes of copies that take turns, so that no cache of a core holds them


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["kernels", "drafts", "decode"])
    parser.add_argument("--run")
    parser.add_argument("--prompts", nargs="+", default=[])
    parser.add_argument("--each", type=int, default=8, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", nargs="+", default=["quantized", "int8", "int4"])
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    with torch.inference_mode():
        {"kernels": kernels, "drafts": drafts, "decode": decode}[args.what](args)


def kernels(args: argparse.Namespace) -> None:
    """Microseconds of each kernel at each product, quantizing the inputs included where it takes integers."""
    print(f"{'':10s}{'M, N, K':>16s}" + "".join(f"{name:>18s}" for name in KERNELS))
    for label, (rows, height, width) in PRODUCTS.items():
        x = torch.randn(rows, width).bfloat16()
        copies = max(2, MEMORY // (height * width))
        made = {name: [make(torch.randn(height, width)) for _ in range(copies)] for name, make in KERNELS.items()}
        times: dict[str, list[float]] = {name: [] for name in KERNELS}
        for _ in range(9):
            for name, products in made.items():
                for product in products:
                    started = time.perf_counter()
                    product(x)
                    times[name].append(1e6 * (time.perf_counter() - started))
        cells = "".join(f"{median(found[copies:]):18.0f}" for found in times.values())
        print(f"{label:10s}{f'{rows}, {height}, {width}':>16s}{cells}", flush=True)


def _bf16(weight: Tensor):
    return partial(F.linear, weight=weight.bfloat16())


def _bf16_prepacked(weight: Tensor):
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _rows_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    q = quantize(weight, scheme_of("int8"), name="weight")
    return q.values, q.scale[:, 0]


def _int8_float_inputs(weight: Tensor):
    values, scale = _rows_of(weight)
    return lambda x: torch._weight_int8pack_mm(x, values, scale.bfloat16())


def _int8_plain(weight: Tensor):
    values, scale = _rows_of(weight)

    def product(x: Tensor) -> Tensor:
        steps, step = quantize_rows(x)
        return (torch._int_mm(steps, values.T) * scale).mul_(step)

    return product


def _int8_onednn(weight: Tensor):
    values, scale = _rows_of(weight)
    packed, zero = torch.ops.onednn.qlinear_prepack(values, None), torch.zeros(len(values), dtype=torch.int64)

    def product(x: Tensor) -> Tensor:
        steps, step = quantize_rows(x)
        return torch.ops.onednn.qlinear_pointwise(
            steps, 1.0, 0, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
        ).mul_(step)

    return product


def _int4(weight: Tensor):
    q = quantize(weight, scheme_of("int4"), name="weight")
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.values.int() + 8, 1)
    scales = torch.stack([q.scale, torch.zeros_like(q.scale)], -1).transpose(0, 1).contiguous().bfloat16()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 32, scales)


KERNELS = {
    "bf16": _bf16,
    "bf16 reordered": _bf16_prepacked,
    "int8, float in": _int8_float_inputs,
    "int8, plain": _int8_plain,
    "int8, reordered": _int8_onednn,
    "int4": _int4,
}


def contestants(args: argparse.Namespace, out: Path):
    """The target, and folders: the drafter as trained, one of its quantized numbers as floats, and packed ones."""
    entries = find_entries([args.run], {}, key="run")
    node = target_node(entries, None)
    assert entries[0].run is not None
    folder = entries[0].run.drafter
    source = open_source(folder, target_folder=resolve(node["weights"], sha256=node.get("sha256")))
    folders = {"float": folder}
    for name in args.only:
        place = out / name
        if name == "quantized":
            drafter, base = load_drafter(folder), scheme_of("int8")
            rounded = {
                key: dequantize(quantize(t, base, name=key)) for key, t in source.tensors.items() if is_quantized(key)
            }
            drafter.load_state_dict({**source.tensors, **rounded})
            save_drafter(drafter, place, spec=source.spec)
        else:
            place.mkdir()
            to_packed.write(source, name, place)
            place /= "drafter"
        folders[name] = place
    return load_target(node, device="cpu"), folders


def load_ms(folder: Path) -> float:
    found = []
    for _ in range(7):
        started = time.perf_counter()
        load_drafter(folder)
        found.append(1e3 * (time.perf_counter() - started))
    return median(found)


def file_facts(folder: Path) -> tuple[int, int, int]:
    """Tensors that are read, bytes of the file, bytes of padding."""
    path = folder / "model.safetensors"
    if "packed" not in (folder / "config.json").read_text():
        return len(load_drafter(folder).state_dict()), path.stat().st_size, 0
    parts = Block.open(path).parts
    return len(parts), path.stat().st_size, block_size(parts)[1]


def drafts(args: argparse.Namespace) -> None:
    """Reading two verified tokens and drafting a block, on a text that grows."""
    with tempfile.TemporaryDirectory() as temp:
        target, folders = contestants(args, Path(temp))
        made = {name: load_drafter(folder, spec=target.spec) for name, folder in folders.items()}
        text = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": "Explain how a bicycle stays upright, in three paragraphs."}],
            add_generation_prompt=True,
            tokenize=False,
        )
        times = side_by_side(target, made, torch.tensor([target.tokenizer(text).input_ids]), args.rounds)
        heads = ("parts", "MB", "padding", "load ms", "read ms", "draft ms", "both ms")
        print(f"{'':12s}" + "".join(f"{head:>10s}" for head in heads))
        for name, found in times.items():
            read, draft = (median(column) for column in zip(*found, strict=True))
            parts, size, padding = file_facts(folders[name])
            times_ms = (load_ms(folders[name]), read, draft, median(a + b for a, b in found))
            cells = f"{parts:10d}{size / 1e6:10.1f}{padding:10d}" + "".join(f"{ms:10.2f}" for ms in times_ms)
            print(f"{name:12s}{cells}")


def side_by_side(target, made, tokens_BT: Tensor, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of `extend` and `propose` in each round, by name."""
    needs = next(iter(made.values())).needs
    cache = target.new_cache(1)
    out = target.step(tokens_BT, cache, needs=needs, logits="last")
    anchor_B = out.logits_BSV[:, -1].argmax(-1)
    sessions = {name: drafter.session(target, 1) for name, drafter in made.items()}
    for session in sessions.values():
        session.share(cache)
        session.extend(tokens_BT, torch.tensor([tokens_BT.shape[1]]), anchor_B, out.aux_BSLD, out.last_BSD)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for number in range(rounds):
        first_B1 = anchor_B[:, None]
        second_B1 = target.step(first_B1, target.new_cache(1)).logits_BSV[:, -1].argmax(-1)[:, None]
        block_B2 = torch.cat([first_B1, second_B1], dim=1)
        out = target.step(block_B2, cache, needs=needs)
        anchor_B = out.logits_BSV[:, -1].argmax(-1)
        for name in random.Random(number).sample(list(sessions), len(sessions)):
            target.step(block_B2, target.new_cache(1), logits="last")
            session, started = sessions[name], time.perf_counter()
            session.extend(block_B2, torch.tensor([2]), anchor_B, out.aux_BSLD, out.last_BSD)
            read = time.perf_counter()
            session.propose(made[name].block_size, Draws(Sampling()))
            times[name].append((1e3 * (read - started), 1e3 * (time.perf_counter() - read)))
    return {name: found[5:] for name, found in times.items()}


def decode(args: argparse.Namespace) -> None:
    """Real decoding: accepted length by source, what is kept of it, milliseconds a draft and a token."""
    folder = Path(tempfile.mkdtemp())
    try:
        target, folders = contestants(args, folder)
        encoder = prompt_encoder(target.tokenizer, max_length=target.spec.max_position, template_kwargs={})
        wanted = PromptConfig(num_prompts=args.each, turns=1)
        dialogues, _ = source_prompts(SourceConfig(path=args.prompts), encoder, wanted, room=1024)
        config = DecodeConfig(max_new_tokens=args.tokens, batch_size=args.batch)
        before = load_drafter(folders["float"], spec=target.spec)
        for name in args.only:
            after = load_drafter(folders[name], spec=target.spec)
            kept, costs = measure_kept(target, before, after, dialogues, config, Execution())
            for one in kept:
                print(
                    f"{name:10s}{one.source:14s}{one.prompts:4d} prompts {one.before:7.3f} -> {one.after:.3f}, kept "
                    f"{one.share:6.1%} [{one.share_low:.1%}, {one.share_high:.1%}]"
                )
            for which, (draft_ms, token_ms) in costs.items():
                print(f"{name:10s}{which:14s}{draft_ms:7.2f} ms a draft, {token_ms:.2f} ms a token", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
