# The shapes that steps are measured at: the published recipes for Qwen3-4B and Qwen3-8B (conf/experiment/dspark_*) with
# random weights, and a toy of the same kind for a CPU.

from dataclasses import dataclass, replace

import torch

from drafters.heads.block import BlockDrafter
from drafters.losses import LossWeights
from drafters.spec import TargetSpec
from drafters.states import log_sum_exp
from drafters.target import TargetHead
from drafters.types import Batch
from drafters.vocab import DraftVocab
from tests.bench.block_step import smollm2_spec

__all__ = ["SIZES", "Size", "make_batch", "make_drafter", "make_head"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """A target's numbers (hidden, layers, vocabulary, heads, key/value heads, head width, intermediate), what the
    recipe drafts with, and the texts of a step."""

    target: tuple[int, int, int, int, int, int, int]
    tied: bool
    layer_ids: tuple[int, ...] = (1, 9, 17, 25, 33)
    num_layers: int = 5
    block_size: int = 7
    num_anchors: int = 512
    rank: int = 256
    draft_vocab: int = 32_000
    num_rows: int = 1
    width: int = 4096

    def spec(self) -> TargetSpec:
        hidden, num_layers, vocab, heads, kv_heads, head_dim, intermediate = self.target
        return replace(
            smollm2_spec(),
            hidden_size=hidden,
            num_layers=num_layers,
            vocab_size=vocab,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=intermediate,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            rope_inv_freq=tuple(1e6 ** (-2 * i / head_dim) for i in range(head_dim // 2)),
            max_position=40_960,
            tied_head=self.tied,
            mask_token_id=min(151_669, vocab - 1),
        )


SIZES = {
    "qwen3_8b": Size(target=(4096, 36, 151_936, 32, 8, 128, 12_288), tied=False),
    "qwen3_4b": Size(target=(2560, 36, 151_936, 32, 8, 128, 9_728), tied=True),
    "tiny": Size(
        target=(48, 8, 509, 4, 2, 16, 80),
        tied=False,
        layer_ids=(1, 3, 5),
        num_layers=2,
        block_size=3,
        num_anchors=12,
        rank=8,
        draft_vocab=130,
        num_rows=2,
        width=60,
    ),
}


def make_head(size: Size, device: torch.device) -> TargetHead:
    """Random rows in bfloat16, of about the size of trained ones."""
    spec = size.spec()
    shape = spec.vocab_size, spec.hidden_size
    embedding, output = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(2 * spec.hidden_size**-0.5) for _ in range(2)
    )
    return TargetHead(spec, embedding_VD=embedding, lm_head_VD=embedding if size.tied else output)


def make_batch(size: Size, head: TargetHead, device: torch.device) -> Batch:
    """Texts of full width, supervised after a tenth."""
    num_rows, width, hidden = size.num_rows, size.width, head.spec.hidden_size
    states = torch.randn(num_rows, width, len(size.layer_ids) + 1, hidden, device=device).bfloat16()
    last_BTD = states[:, :, -1].contiguous()
    lse = log_sum_exp(head, last_BTD.flatten(0, 1))
    return Batch(
        tokens_BT=torch.randint(0, head.spec.vocab_size, (num_rows, width), device=device),
        lengths_B=torch.full((num_rows,), width, device=device),
        loss_mask_BT=(torch.arange(width, device=device) >= width // 10).expand(num_rows, -1),
        aux_BTLD=states[:, :, :-1].contiguous(),
        last_BTD=last_BTD,
        lse_BT=lse.view(num_rows, width),
        layer_ids=size.layer_ids,
        seeds=tuple(range(num_rows)),
    )


def make_drafter(size: Size, device: torch.device, *, reduced: bool, num_anchors: int | None = None) -> BlockDrafter:
    """The recipe's drafter, random, over the whole vocabulary or a reduced one."""
    spec = size.spec()
    config = BlockDrafter.Config(
        layer_ids=size.layer_ids,
        num_layers=size.num_layers,
        block_size=size.block_size,
        window=None,
        num_anchors=num_anchors or size.num_anchors,
        sequential={"_target_": "drafters.heads.sequential.MarkovHead", "rank": size.rank},
        draft_vocab_size=size.draft_vocab if reduced else None,
        init="random",
        loss=LossWeights(ce=0.1, l1=0.9, kl=0.0, confidence=1.0),
    )
    with torch.device(device):
        ids_V = torch.randperm(spec.vocab_size)[: size.draft_vocab].sort().values
        return BlockDrafter(config, spec, vocab=DraftVocab(ids_V, num_full=spec.vocab_size) if reduced else None)
