# Everything that needs an NVIDIA GPU, in one call of a few minutes: what the CPU tests prove is proved again on CUDA
# against the CPU, then a short run of train.py is timed. Prints a JSON summary; exit code 1 when a check fails.
#   python -m tests.gpu.check_gpu [--steps 300] [--target auto|default|random] [--out FOLDER] [--only NAME ...]

import argparse
import csv
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drafters.errors import DraftersError
from drafters.types import Batch

ROOT = Path(__file__).resolve().parents[2]
Facts = dict[str, Any]
# What a check may raise: a wrong number, or whatever a kernel or the compiler says.
FAILURES = (AssertionError, RuntimeError, TypeError, ValueError, LookupError, OSError, DraftersError)


def close(got: torch.Tensor, expected: torch.Tensor, *, tolerance: float) -> float:
    """Largest error relative to the largest expected value; AssertionError above `tolerance`."""
    got, expected = got.detach().double().cpu(), expected.detach().double()
    error = float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    assert error <= tolerance, f"relative error {error:.2e}, accepted {tolerance:.0e}"
    return error


def check_decoding(args: argparse.Namespace) -> Facts:
    """Float32, temperature 0: plain texts and those drafted as chains and as trees on CUDA are those of the CPU, for
    batches of 1 and 3."""
    from drafters.decoding.loop import DecodeConfig, decode
    from drafters.decoding.tree import static_tree
    from drafters.target import FrozenTarget
    from tests.copy_drafter import CopyDrafter, sharp_target

    def on_gpu(noise: float) -> FrozenTarget:
        model = sharp_target(vocab_size=128, scale=30, noise=noise).model.to(args.device)
        return FrozenTarget.from_model(model, mask_token_id=0)

    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 128, (n,), generator=generator) for n in (9, 3, 17, 1, 6)]
    expected = decode(
        sharp_target(vocab_size=128, scale=30), None, prompts, DecodeConfig(max_new_tokens=40, stop_ids=())
    )
    target, drafter = on_gpu(0.0), CopyDrafter(on_gpu(0.3), block_size=4)
    accepted: set[int] = set()
    for batch_size in (1, 3):
        config = DecodeConfig(max_new_tokens=40, stop_ids=(), batch_size=batch_size)
        for name, rows in (
            ("plain", decode(target, None, prompts, config)),
            ("drafted", decode(target, drafter, prompts, config)),
            ("tree", decode(target, drafter, prompts, replace(config, tree=static_tree([3, 2, 1])))),
        ):
            for row, twin in zip(rows, expected, strict=True):
                assert row.tokens == twin.tokens, f"{name}, batch {batch_size}, prompt {row.prompt}: another text"
            accepted |= {r.accepted for row in rows for r in row.rounds}
    assert accepted == set(range(5)), f"accepted counts {accepted} do not cover 0..4, so the check proves little"
    return {"prompts": len(prompts), "accepted_counts": sorted(accepted)}


def check_attention(args: argparse.Namespace) -> Facts:
    """flex_block_attention on CUDA against the CPU path, value and gradients."""
    from drafters.heads.masks import BlockLayout, block_attention, flex_block_attention

    facts: Facts = {}
    for dtype, tolerance in ((torch.float32, 5e-3), (torch.bfloat16, 3e-2)):
        for window in (1, 64, None):
            torch.manual_seed(0)
            layout = BlockLayout(
                rows_A=torch.tensor([0] * 20 + [1] * 9 + [2]),
                positions_A=torch.cat([torch.randperm(180)[:n].sort().values + 1 for n in (20, 9, 1)]),
                num_rows=3,
                num_context=200,
                block_size=5,
                window=window,
            )
            shapes = [(150, 9, 64), (600, 3, 64), (600, 3, 64), (150, 3, 64), (150, 3, 64)]
            inputs = [torch.randn(shape).to(dtype) for shape in shapes]
            inputs[0] = inputs[0] / 8
            upstream = torch.randn(150, 9 * 64)

            def run(function: Any, device: str, used: torch.dtype) -> list[torch.Tensor]:
                q, k, v, bk, bv = leaves = [x.to(device, used).requires_grad_() for x in inputs]  # noqa: B023
                rows_A, positions_A = layout.rows_A.to(device), layout.positions_A.to(device)  # noqa: B023
                there = replace(layout, rows_A=rows_A, positions_A=positions_A)  # noqa: B023
                out = function(q, (k, v), (bk, bv), there)
                gradients = torch.autograd.grad(out, leaves, upstream.to(out))  # noqa: B023
                return [out, *gradients]

            pairs = zip(
                run(flex_block_attention, "cuda", dtype), run(block_attention, "cpu", torch.float32), strict=True
            )
            errors = [close(got, expected, tolerance=tolerance) for got, expected in pairs]
            facts[f"{str(dtype).removeprefix('torch.')}, window {window}"] = f"{max(errors):.1e}"
    return {"largest_relative_errors": facts}


def check_loss(args: argparse.Namespace) -> Facts:
    """The chunked loss on CUDA against the same on the CPU in float64, every term, whole and reduced vocabulary."""
    from drafters.losses import DistillInput, LossWeights, distill
    from drafters.target import TargetHead
    from drafters.vocab import DraftVocab
    from tests.tiny import tiny_spec

    num_vocab, hidden, rank, num_rows = 4099, 64, 8, 300
    torch.manual_seed(0)
    spec = replace(tiny_spec(), vocab_size=num_vocab, hidden_size=hidden)
    weight_VD, target_MD = torch.randn(num_vocab, hidden) / 4, torch.randn(100, hidden)
    rows_N, labels_N = torch.randint(0, 100, (num_rows,)).sort().values, torch.randint(0, num_vocab, (num_rows,))
    given = [target_MD[rows_N] + 0.3 * torch.randn(num_rows, hidden), torch.randn(num_rows, rank)]
    lse_M = (target_MD.double() @ weight_VD.double().T).logsumexp(-1)
    weights = LossWeights(ce=0.5, l1=1.0, kl=0.7, lk=0.2, chunk=64)
    facts: Facts = {}
    for ids_V in (None, torch.arange(1, num_vocab, 3)):
        bias_VR = 0.3 * torch.randn(num_vocab if ids_V is None else len(ids_V), rank)

        def run(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
            hidden_ND, bias_NR, leaf_VR = leaves = [
                x.to(device, dtype).requires_grad_()
                for x in (*given, bias_VR)  # noqa: B023
            ]
            rows_VD = weight_VD.to(device, dtype)
            found = distill(
                DistillInput(
                    hidden_ND=hidden_ND,
                    target_MD=target_MD.to(device, dtype),
                    target_rows_N=rows_N.to(device),
                    labels_N=labels_N.to(device),
                    weights_N=torch.ones(num_rows, device=device),
                    lse_M=lse_M.to(device, dtype),
                    bias_NR=bias_NR,
                    bias_weight_VR=leaf_VR,
                    vocab=None if ids_V is None else DraftVocab(ids_V.to(device), num_full=num_vocab),  # noqa: B023
                ),
                TargetHead(spec, embedding_VD=rows_VD, lm_head_VD=rows_VD),
                weights,
                want_metrics=True,
            )
            assert found.accept_N is not None
            return [found.total, found.accept_N, *torch.autograd.grad(found.total, leaves)]

        pairs = zip(run(str(args.device), torch.float32), run("cpu", torch.float64), strict=True)
        errors = [close(got, expected, tolerance=1e-3) for got, expected in pairs]
        facts["whole" if ids_V is None else "reduced"] = f"{max(errors):.1e}"
    return {"largest_relative_errors": facts}


def check_step(args: argparse.Namespace) -> Facts:
    """A bfloat16 step of the shipped drafter on SmolLM2 sizes: loss and gradient as on the CPU, and its speed."""
    from tests.bench.block_step import make_batch, make_drafter, make_head, smollm2_spec

    torch.manual_seed(0)
    spec = smollm2_spec()
    head = make_head(spec)
    batch, drafter = make_batch(spec, head), make_drafter(spec, num_draft=8192, window=64)

    def step(device: str, batch: Batch) -> tuple[float, torch.Tensor, float]:
        drafter.to(device).zero_grad()
        with torch.autocast(device, torch.bfloat16):
            losses = drafter.loss(batch, head.to(device))
        losses.total.backward()
        gradient = torch.cat([p.grad.flatten().cpu() for p in drafter.parameters() if p.grad is not None])
        return float(losses.total), gradient, float(losses.count)

    total, gradient, _ = step("cpu", batch)
    there = to_gpu(batch)
    gpu_total, gpu_gradient, count = step("cuda", there)
    assert abs(gpu_total / total - 1) < 0.02, f"loss {gpu_total} on CUDA, {total} on the CPU"
    cosine = float(torch.nn.functional.cosine_similarity(gpu_gradient.double(), gradient.double(), dim=0))
    assert cosine > 0.99, f"cosine of the gradients {cosine}"
    gpu_head, optimizer = head.to("cuda"), torch.optim.AdamW(drafter.parameters(), lr=1e-3, fused=True)
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            losses = drafter.loss(there, gpu_head)
        losses.total.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    median = sorted(seconds[5:])[7]
    return {
        "gradient_cosine": round(cosine, 5),
        "step_ms": round(1e3 * median, 2),
        "positions_per_second": round(count / median),
        "peak_memory_mb": round(torch.cuda.max_memory_allocated() / 1e6),
    }


def to_gpu(batch: Batch) -> Batch:
    """The batch with its tensors on the GPU."""
    moved = {name: value.cuda() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return replace(batch, **moved)


def check_training(args: argparse.Namespace) -> Facts:
    """A short run of train.py on the GPU: it learns, and its real-decode report."""
    from hydra import compose, initialize_config_dir

    import train

    kind, overrides = target_overrides(args)
    name = f"name=gpu-{kind}"
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        settings = (
            *("device=cuda", f"outputs={args.out}", f"cache.root={args.out}/states", name, *overrides),
            *("optim.minutes=null", f"optim.max_steps={args.steps}", "optim.warmup_steps=20", "optim.precision=bf16"),
            *(f"trainer.val_check_interval={args.steps // 2}", "callbacks.probe_every_n_steps=null"),
            *("report.num_prompts=8", "report.max_new_tokens=64", "data.batch_size=8"),
        )
        cfg = compose("train", list(settings))
    start = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    train.train(cfg)
    run = Path(cfg.run_dir)
    state = torch.load(run / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)["drafters"]
    with next(run.glob("logs/*/metrics.csv")).open() as stream:
        losses = [float(row["train/loss"]) for row in csv.DictReader(stream) if row["train/loss"]]
    tenth = max(1, len(losses) // 10)
    before, after = (sum(part) / len(part) for part in (losses[:tenth], losses[-tenth:]))
    # A random target has little to teach in a few steps.
    assert after < before or kind == "random", f"the loss did not fall: {before:.3f} -> {after:.3f}"
    report = json.loads((run / "report.json").read_text())
    shown = ("accepted_length", "draft_length", "tokens_per_second", "baseline_tokens_per_second", "speedup")
    shown += ("draft_ms", "verify_ms", "baseline_step_ms", "dispatch_share", "divergences")
    return {
        "target": kind,
        "positions_per_second": round(state["positions"] / state["seconds"]),
        "loss": [round(before, 3), round(after, 3)],
        "peak_memory_mb": round(torch.cuda.max_memory_allocated() / 1e6),
        "minutes_in_all": round((time.perf_counter() - start) / 60, 2),
        **{key: report[key] for key in shown},
    }


def target_overrides(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The default target where its weights can be had, else a random Llama of its size on invented conversations."""
    from drafters.errors import CheckpointError
    from drafters.weights import resolve

    if args.target != "random":
        from omegaconf import OmegaConf

        node = OmegaConf.load(ROOT / "conf" / "target" / "smollm2.yaml")
        try:
            resolve(node.weights, sha256=node.sha256)
            return "smollm2", ["source.limit=200"]
        except CheckpointError as error:
            if args.target == "default":
                raise
            sys.stderr.write(f"{error}\nso a random Llama of the same size stands in\n")
    return "random", random_target(args.out)


def random_target(out: Path) -> list[str]:
    """Writes a random Llama of SmolLM2's size, a tokenizer and conversations, and names them as overrides."""
    from tests.tiny import tiny_llama
    from tests.tiny_chat import tiny_tokenizer

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    sizes |= {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 2048}
    tiny_llama(**sizes, tie_word_embeddings=True).bfloat16().save_pretrained(out / "target")
    tiny_tokenizer("chatml").save_pretrained(out / "target")
    words = ("the", "sky", "is", "blue", "and", "grass", "green", "once", "upon", "a", "time", "there", "was", "tool")
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(200):
        picked = torch.randint(0, len(words), (40,), generator=generator).tolist()
        answer = " ".join(words[j] for j in picked)
        user = {"role": "user", "content": f"What about tool {i}?"}
        rows.append({"messages": [user, {"role": "assistant", "content": answer}]})
    (out / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("source=jsonl", f"source.path={out}/chats.jsonl", f"target.weights={out}/target", "target.sha256=null"),
        *("target.name=random", "target.mask_token=0", "drafter.draft_vocab_size=256"),
    ]


def check_prefetch(args: argparse.Namespace) -> Facts:
    """Batches read ahead by a thread are those of plain reading, and arrive while the GPU is busy."""
    from tests.gpu.prefetch import compare

    return compare()


def check_dense(args: argparse.Namespace) -> Facts:
    """Compiled dense ends of draft layers, kept or computed again, against plain ones: loss and gradients, float32."""
    from drafters.computing import Computing, computed_as
    from tests.gpu.shapes import SIZES, make_batch, make_drafter, make_head

    torch.manual_seed(0)
    size = SIZES["tiny"]
    head, drafter = make_head(size, args.device), make_drafter(size, args.device, reduced=False)
    batch, weights = make_batch(size, head, args.device), list(drafter.parameters())

    def learned(how: Computing) -> list[torch.Tensor]:
        with computed_as(how):
            total = drafter.loss(batch, head).total
        return [total, *torch.autograd.grad(total, weights, allow_unused=True, materialize_grads=True)]

    plain = [one.detach().cpu() for one in learned(Computing())]
    facts: Facts = {}
    for recompute in (False, True):
        pairs = zip(learned(Computing(compile=True, recompute=recompute)), plain, strict=True)
        errors = [close(got, expected, tolerance=1e-2) for got, expected in pairs]
        facts["recomputed" if recompute else "kept"] = f"{max(errors):.1e}"
    return {"largest_relative_errors": facts}


CHECKS: dict[str, Callable[[argparse.Namespace], Facts]] = {
    "decoding": check_decoding,
    "attention": check_attention,
    "loss": check_loss,
    "dense": check_dense,
    "step": check_step,
    "prefetch": check_prefetch,
    "training": check_training,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="All checks that need an NVIDIA GPU.")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of the training run")
    parser.add_argument("--target", choices=("auto", "default", "random"), default="auto")
    parser.add_argument("--out", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--only", nargs="+", choices=sorted(CHECKS), default=list(CHECKS))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("check_gpu: no CUDA device here; run it on a machine with an NVIDIA GPU and a CUDA build of torch")
    args.device = torch.device("cuda")
    os.chdir(ROOT)
    warnings.simplefilter("default")
    summary: Facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "checks": {}}
    with tempfile.TemporaryDirectory(prefix="check-gpu-") as temporary:
        args.out = (args.out or Path(temporary)).resolve()
        args.out.mkdir(parents=True, exist_ok=True)
        for name in args.only:
            start = time.perf_counter()
            try:
                facts: Facts = {"ok": True, **CHECKS[name](args)}
            except FAILURES as error:
                traceback.print_exc()
                facts = {"ok": False, "error": f"{type(error).__name__}: {error}"[:600]}
            facts["seconds"] = round(time.perf_counter() - start, 1)
            summary["checks"][name] = facts
            sys.stderr.write(f"{name}: {'ok' if facts['ok'] else 'FAILED'} in {facts['seconds']} s\n")
    summary["ok"] = all(facts["ok"] for facts in summary["checks"].values())
    print(json.dumps(summary, indent=1))
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
