# Positions per second of whole training steps of the block drafter, on SmolLM2 sizes with random states.
#   python -m tests.bench.block_step [threads] [draft vocabulary, 0 = all] [window, 0 = all] [profile]

import sys
import time

import torch

from drafters.heads.block import BlockDrafter
from drafters.losses import LossWeights
from drafters.spec import TargetSpec
from drafters.states import log_sum_exp
from drafters.target import TargetHead
from drafters.types import Batch
from drafters.vocab import DraftVocab
from tests.bench.step_world import LAYER_IDS, Setting

NUM_ROWS, WIDTH = 2, 250


def smollm2_spec(*, vocab_size: int = 49152) -> TargetSpec:
    """The sizes of SmolLM2-135M; `vocab_size` as asked."""
    return TargetSpec(
        hidden_size=576,
        num_layers=30,
        vocab_size=vocab_size,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        rope_inv_freq=tuple(100000.0 ** (-i / 32) for i in range(32)),
        max_position=8192,
        tied_head=True,
        logit_scale=1.0,
        logit_softcap=None,
        embed_scale=1.0,
        bos_id=1,
        eos_ids=(2,),
        mask_token_id=5,
        template_hash="",
        weights_hash="",
        dtype="bfloat16",
    )


def make_head(spec: TargetSpec) -> TargetHead:
    """Random rows in bfloat16, of about the size of trained ones."""
    weight = (torch.randn(spec.vocab_size, spec.hidden_size) * 0.1).bfloat16()
    return TargetHead(spec, embedding_VD=weight, lm_head_VD=weight)


def make_batch(spec: TargetSpec, head: TargetHead) -> Batch:
    """Two conversations of 250 tokens, supervised from token 40 on."""
    last_BTD = torch.randn(NUM_ROWS, WIDTH, spec.hidden_size).bfloat16()
    lse = log_sum_exp(head, last_BTD.flatten(0, 1))
    return Batch(
        tokens_BT=torch.randint(0, spec.vocab_size, (NUM_ROWS, WIDTH)),
        lengths_B=torch.full((NUM_ROWS,), WIDTH),
        loss_mask_BT=(torch.arange(WIDTH) >= 40).expand(NUM_ROWS, -1),
        aux_BTLD=torch.randn(NUM_ROWS, WIDTH, len(LAYER_IDS), spec.hidden_size).bfloat16(),
        last_BTD=last_BTD,
        lse_BT=lse.view(NUM_ROWS, WIDTH),
        layer_ids=LAYER_IDS,
        seeds=tuple(range(NUM_ROWS)),
    )


def make_drafter(spec: TargetSpec, *, num_draft: int, window: int) -> BlockDrafter:
    """The shipped drafter, random."""
    return _drafter(spec, num_draft, window, rank=64, loss=LossWeights())


def drafter_of(spec: TargetSpec, setting: Setting) -> BlockDrafter:
    """The drafter of a setting, random, with the loss of 2607.05147."""
    sizes = {name: getattr(setting, name) for name in ("num_layers", "block_size", "num_anchors", "confidence", "rank")}
    loss = LossWeights(ce=0.1, l1=0.9, kl=0.0)
    return _drafter(spec, setting.draft_vocab, setting.window, loss=loss, **sizes)


def _drafter(
    spec: TargetSpec, num_draft: int, window: int, *, rank: int, loss: LossWeights, **settings: int
) -> BlockDrafter:
    ids_V = torch.randperm(spec.vocab_size)[: num_draft or None].sort().values
    vocab = DraftVocab(ids_V, num_full=spec.vocab_size) if num_draft else None
    config = BlockDrafter.Config(
        layer_ids=LAYER_IDS,
        window=window or None,
        sequential={"_target_": "drafters.heads.sequential.MarkovHead", "rank": rank},
        draft_vocab_size=num_draft or None,
        loss=loss,
        **settings,
    )
    return BlockDrafter(config, spec, vocab=vocab)


def main(threads: int = 1, num_draft: int = 8192, window: int = 64, profile: str = "") -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    spec = smollm2_spec()
    head = make_head(spec)
    batch, drafter = make_batch(spec, head), make_drafter(spec, num_draft=num_draft, window=window)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, fused=True)

    def step() -> dict[str, float]:
        times = {}
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            losses = drafter.loss(batch, head)
        times["forward"] = time.perf_counter() - start
        losses.total.backward()
        times["backward"] = time.perf_counter() - start - times["forward"]
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times["step"] = time.perf_counter() - start
        times["count"] = float(losses.count)
        return times

    runs = [step() for _ in range(12)][2:]
    best = {name: min(run[name] for run in runs) for name in runs[0]}
    median = sorted(run["step"] for run in runs)[len(runs) // 2]
    parts = ", ".join(f"{name} {best[name] * 1e3:.0f} ms" for name in ("forward", "backward", "step"))
    print(
        f"threads {threads}, draft vocabulary {num_draft}, window {window}: {parts}; "
        f"{best['count'] / best['step']:.0f} positions/s (median {best['count'] / median:.0f})"
    )
    if profile:
        shapes = profile == "shapes"
        with torch.profiler.profile(record_shapes=shapes) as found:
            for _ in range(3):
                step()
        table = found.key_averages(group_by_input_shape=shapes)
        print(table.table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=50))


if __name__ == "__main__":
    main(*(int(a) if a.isdigit() else a for a in sys.argv[1:]))
