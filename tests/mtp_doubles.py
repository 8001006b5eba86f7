# A naive twin of the MTP modules: one conversation, dense masks, no caches; and small drafters to compare with it.

import torch
import torch.nn.functional as F

from drafters.heads.mtp import MtpDrafter
from drafters.heads.mtp_block import plain_config
from drafters.vocab import DraftVocab


def make_mtp(target, *, seed=0, reduced=True, spread=0.15, **settings):
    """A random drafter whose every part acts."""
    torch.manual_seed(seed)
    num_full = target.spec.vocab_size
    vocab = DraftVocab(torch.arange(0, num_full, 2), num_full=num_full) if reduced else None
    if settings.get("block") == "target":
        settings["target_config"] = plain_config(target)
    defaults = dict(block_size=3, num_anchors=8)
    config = MtpDrafter.Config(**{**defaults, **settings}, draft_vocab_size=vocab.size if vocab else None)
    drafter = MtpDrafter(config, target.spec, vocab=vocab)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=spread)
    return drafter.eval()


def naive_depths(drafter, target, tokens_T, last_TD):
    """The outputs [T, D] of every depth's block; row i is meaningful where i + k (from 1) is a token."""
    states, state_TD = [], last_TD
    for k in range(1, drafter.block_size + 1):
        depth = drafter.depth(k - 1)
        length = len(tokens_T) - k
        rows = []
        for i in range(length):
            halves = [
                norm(target.embed(tokens_T[i + k]).float(), depth.token_layernorm),
                norm(state_TD[i], depth.hidden_layernorm),
            ]
            if drafter.config.order == "hidden_first":
                halves.reverse()
            rows.append(depth.input_proj.weight @ torch.cat(halves))
        output_TD = naive_layer(depth.block, torch.stack(rows), drafter.spec)
        states.append(output_TD)
        state_TD = norm(output_TD, depth.final_layernorm) if drafter.config.feedback == "after_norm" else output_TD
    return states


def norm(x, module):
    return F.rms_norm(x, (x.shape[-1],), module.weight, module.eps)


def naive_layer(layer, x_TD, spec):
    """A draft layer with torch's own attention under a dense causal mask."""
    attn, num_groups = layer.self_attn, spec.num_heads // spec.num_kv_heads

    def heads(x_TC):
        return x_TC.unflatten(-1, (-1, spec.head_dim)).transpose(0, 1)

    def rotate(x_NTH):
        angles = torch.arange(x_NTH.shape[1])[:, None] * torch.tensor(spec.rope_inv_freq)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        first, second = x_NTH.chunk(2, -1)
        return x_NTH * cos + torch.cat([-second, first], -1) * sin

    y = norm(x_TD, layer.input_layernorm)
    q = rotate(norm(heads(attn.q_proj(y)), attn.q_norm))
    k = rotate(norm(heads(attn.k_proj(y)), attn.k_norm)).repeat_interleave(num_groups, 0)
    v = heads(attn.v_proj(y)).repeat_interleave(num_groups, 0)
    mask = torch.ones(len(x_TD), len(x_TD), dtype=torch.bool).tril()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    x_TD = x_TD + attn.o_proj(out.transpose(0, 1).flatten(1))
    y = norm(x_TD, layer.post_attention_layernorm)
    return x_TD + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
