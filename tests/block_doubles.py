# A small block drafter on a tiny target, with batches of the target's own states, and naive twins of its parts.

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.heads.block import BlockDrafter
from drafters.heads.sequential import SequentialHead
from drafters.losses import LossWeights
from drafters.target import FrozenTarget
from drafters.types import Batch, Needs
from drafters.vocab import DraftVocab

LAYER_IDS = (0, 2)
MARKOV = {"_target_": "drafters.heads.sequential.MarkovHead", "rank": 6}
GATED = {"_target_": "drafters.heads.sequential.GatedHead", "rank": 6}
RNN = {"_target_": "drafters.heads.sequential.RNNHead", "rank": 6}
RUNNING = {"_target_": "tests.block_doubles.RunningHead"}


class RunningHead(SequentialHead):
    """A head with a state (the sum of what came before) that reads the backbone too, as recurrent heads do."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        rank: int = 6

    def __init__(self, config: Config, spec: Any, num_draft: int) -> None:
        super().__init__()
        self.config = config
        self.markov_w1 = nn.Embedding(spec.vocab_size, config.rank)
        self.markov_w2 = nn.Linear(config.rank, num_draft, bias=False)
        self.mix = nn.Linear(spec.hidden_size, config.rank)

    def start(self, num_rows: int) -> Tensor:
        return torch.zeros(num_rows, self.config.rank)

    def step(self, state: Tensor | None, embedded_NR: Tensor, hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
        assert state is not None
        state = torch.tanh(state + embedded_NR + self.mix(hidden_ND))
        return state, state


def make_drafter(target: FrozenTarget, *, seed: int = 0, reduced: bool = True, **settings: Any) -> BlockDrafter:
    """A random drafter whose every part acts (W_2, gains and the confidence head are not at their trivial start)."""
    torch.manual_seed(seed)
    vocab = DraftVocab(torch.arange(0, target.spec.vocab_size, 2), num_full=target.spec.vocab_size) if reduced else None
    defaults: dict[str, Any] = dict(
        layer_ids=LAYER_IDS,
        block_size=4,
        window=5,
        num_anchors=8,
        sequential=MARKOV,
        loss=LossWeights(ce=0.2, chunk=16),
    )
    config = BlockDrafter.Config(**{**defaults, **settings}, draft_vocab_size=vocab.size if vocab else None)
    drafter = BlockDrafter(config, target.spec, vocab=vocab)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif "markov_w" not in name:
                parameter.normal_(std=0.3)
        if drafter.markov_head is not None:
            drafter.markov_head.markov_w2.weight.normal_(std=0.3)
    return drafter


def make_batch(
    target: FrozenTarget, lengths: list[int], *, seed: int = 0, prompt: int = 3, width: int | None = None
) -> Batch:
    """Random conversations with the target's states; all after `prompt` tokens is supervised."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths) if width is None else width
    lengths_B = torch.tensor(lengths)
    valid_BT = torch.arange(width) < lengths_B[:, None]
    tokens_BT = torch.randint(4, target.spec.vocab_size, (len(lengths), width), generator=generator) * valid_BT
    return batch_of(target, tokens_BT, lengths_B, valid_BT & (torch.arange(width) >= prompt), seed=seed)


def batch_of(target: FrozenTarget, tokens_BT: Tensor, lengths_B: Tensor, mask_BT: Tensor, *, seed: int) -> Batch:
    states = target.states(tokens_BT, needs=Needs(layer_ids=LAYER_IDS, last=True), lengths_B=lengths_B)
    assert states.aux_BTLD is not None
    assert states.last_BTD is not None
    last_BTD = states.last_BTD.clone()
    return Batch(
        tokens_BT=tokens_BT,
        lengths_B=lengths_B,
        loss_mask_BT=mask_BT,
        aux_BTLD=states.aux_BTLD.clone(),
        last_BTD=last_BTD,
        lse_BT=target.head.logits(last_BTD).logsumexp(-1),
        layer_ids=LAYER_IDS,
        seeds=tuple(range(seed, seed + len(lengths_B))),
    )


def naive_states(drafter: BlockDrafter, target: FrozenTarget, aux_TLD: Tensor, anchor: int, position: int) -> Tensor:
    """States [G, D] of one block after the final norm: one anchor, a dense mask, torch's own attention. Draft k comes
    from the k-th slot, the anchor's at first, or from the mask token at the draft's own position."""
    spec, config = drafter.spec, drafter.config
    size = config.block_size if config.sample_from_anchor else 1 + config.block_size
    num_groups = spec.num_heads // spec.num_kv_heads

    def norm(x: Tensor, module: Any) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), module.weight, spec.rms_norm_eps)

    def rotate(x_NTH: Tensor, positions_T: Tensor) -> Tensor:
        angles = positions_T[:, None] * torch.tensor(spec.rope_inv_freq)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        first, second = x_NTH.chunk(2, -1)
        return x_NTH * cos + torch.cat([-second, first], -1) * sin

    def heads(x_TC: Tensor) -> Tensor:
        return x_TC.unflatten(-1, (-1, spec.head_dim)).transpose(0, 1)

    context = norm(drafter.fc(torch.cat(list(aux_TLD.unbind(1)), -1)), drafter.hidden_norm)
    positions_T, slots = torch.arange(len(context)), position + torch.arange(size)
    oldest = 0 if config.window is None else position - config.window
    mask = torch.cat([(positions_T < position) & (positions_T >= oldest), torch.ones(size, dtype=torch.bool)])
    x = target.embed(torch.tensor([anchor] + [spec.mask_token_id] * (size - 1))).float()
    for layer in drafter.layers:
        attn, y = layer.self_attn, norm(x, layer.input_layernorm)
        q = rotate(norm(heads(attn.q_proj(y)), attn.q_norm), slots)
        k_own = rotate(norm(heads(attn.k_proj(y)), attn.k_norm), slots)
        k_seen = rotate(norm(heads(attn.k_proj(context)), attn.k_norm), positions_T)
        k = torch.cat([k_seen, k_own], 1).repeat_interleave(num_groups, 0)
        v = torch.cat([heads(attn.v_proj(context)), heads(attn.v_proj(y))], 1).repeat_interleave(num_groups, 0)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(size, -1))
        x = x + attn.o_proj(out.transpose(0, 1).flatten(1))
        y = norm(x, layer.post_attention_layernorm)
        x = x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
    return norm(x if config.sample_from_anchor else x[1:], drafter.norm)
