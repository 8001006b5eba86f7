# A reader of GGUF drafts that knows nothing of our classes: it goes by the keys and tensors of the file alone, as
# llama.cpp's graphs of `dflash` and `eagle3` do, with torch's own attention.

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from gguf import GGUFReader, quants

from drafters.target import FrozenTarget

# Drafts that llama.cpp takes: a family, and the settings that it has.
CASES = {
    "markov": {},
    "markov-bonus": {"sample_from_anchor": False},
    "markov-unsure": {"confidence": False},
    "parallel": {},
    "parallel-anchor": {"sample_from_anchor": True},
    "parallel-sure": {"confidence": True},
    "eagle3": {},
    "eagle3-normed": {"norm_before_residual": True},
}


class GgufDraft:
    """Keys without the name of the architecture, and float32 tensors as rows x columns."""

    def __init__(self, path: Path, target: FrozenTarget) -> None:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        self.arch = fields["general.architecture"]
        self.keys = {name.removeprefix(f"{self.arch}."): value for name, value in fields.items()}
        self.tensors = {}
        for one in reader.tensors:
            data = one.data if one.tensor_type.name == "I64" else quants.dequantize(one.data, one.tensor_type)
            self.tensors[one.name] = torch.tensor(data).view(*reversed(one.shape.tolist()))
        self.target = target
        self.rope = (range(0, self.keys["rope.dimension_count"], 2), self.keys["rope.freq_base"])

    def embed(self, ids):
        """`dflash` scales the target's embedding by a key; `eagle3` knows no scale."""
        table = self.tensors.get("token_embd.weight", self.target.model.get_input_embeddings().weight)
        return table[ids].float() * (self.keys["embedding_scale"] if self.arch == "dflash" else 1.0)

    def head(self):
        return self.tensors.get("output.weight", self.target.model.get_output_embeddings().weight).float()

    def states(self, tokens_T):
        """Inputs of the layers that the file names, of every position, side by side."""
        found = self.target.model(tokens_T[None], output_hidden_states=True).hidden_states
        return torch.cat([found[layer][0] for layer in self.keys["target_layers"]], -1)

    def norm(self, x, name):
        return F.rms_norm(x, (x.shape[-1],), self.tensors[name], self.keys["attention.layer_norm_rms_epsilon"])

    def linear(self, x, name):
        return x @ self.tensors[f"{name}.weight"].T

    def heads(self, x, name):
        return self.linear(x, name).unflatten(-1, (-1, self.keys["attention.key_length"])).transpose(0, 1)

    def angles(self, positions_T):
        dims, base = self.rope
        plain = torch.tensor([base ** (-i / self.keys["rope.dimension_count"]) for i in dims])
        return positions_T[:, None] * plain / self.tensors.get("rope_freqs.weight", 1.0)

    def rotate(self, x_NTH, positions_T):
        """The layout of each architecture: halves in `dflash`, neighbours in `eagle3`."""
        angles = self.angles(positions_T)
        if self.arch == "eagle3":
            first, second = x_NTH[..., ::2], x_NTH[..., 1::2]
            turned = (first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos())
            return torch.stack(turned, -1).flatten(-2)
        first, second = x_NTH.chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1
        )

    def attend(self, q, k, v, mask):
        groups = self.keys["attention.head_count"] // self.keys["attention.head_count_kv"]
        out = F.scaled_dot_product_attention(q, k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0), mask)
        return out.transpose(0, 1).flatten(1)

    def mlp(self, x, block):
        gate, up = self.linear(x, f"{block}.ffn_gate"), self.linear(x, f"{block}.ffn_up")
        return self.linear(F.silu(gate) * up, f"{block}.ffn_down")

    def over_all(self, row):
        """Logits over the target's vocabulary, minus infinity where there is no draft id."""
        if "d2t" not in self.tensors:
            return row
        return torch.full((self.keys["vocab_size"],), -torch.inf).index_put((self.tensors["d2t"],), row)


class DflashDraft(GgufDraft):
    """`--spec-type draft-dspark` where the file has Markov tensors, else `draft-dflash`."""

    def block(self, tokens_T, anchor):
        """States of the slots of a block after the final norm."""
        size, before = self.keys["block_size"], torch.arange(len(tokens_T))
        slots = len(tokens_T) + torch.arange(size)
        seen = torch.ones(size, len(tokens_T) + size, dtype=torch.bool)
        if (window := self.keys.get("attention.sliding_window")) is not None:
            assert self.keys["attention.sliding_window_pattern"] == [True] * self.keys["block_count"]
            seen = slots[:, None] - torch.cat([before, slots]) < window
        fused = self.norm(self.linear(self.states(tokens_T), "fc"), "enc.output_norm.weight")
        x = self.embed(torch.tensor([anchor] + [self.keys["tokenizer.ggml.mask_token_id"]] * (size - 1)))
        for index in range(self.keys["block_count"]):
            name = f"blk.{index}"
            y = self.norm(x, f"{name}.attn_norm.weight")
            q = self.rotate(self.norm(self.heads(y, f"{name}.attn_q"), f"{name}.attn_q_norm.weight"), slots)
            k_own, k_seen = (
                self.rotate(self.norm(self.heads(one, f"{name}.attn_k"), f"{name}.attn_k_norm.weight"), places)
                for one, places in ((y, slots), (fused, before))
            )
            v = torch.cat([self.heads(fused, f"{name}.attn_v"), self.heads(y, f"{name}.attn_v")], 1)
            x = x + self.linear(self.attend(q, torch.cat([k_seen, k_own], 1), v, seen), f"{name}.attn_output")
            x = x + self.mlp(self.norm(x, f"{name}.ffn_norm.weight"), name)
        return self.norm(x, "output_norm.weight")

    def draft(self, tokens_T, anchor):
        """Greedy drafts, and the confidence of each (None without a head)."""
        states, is_dspark = self.block(tokens_T, anchor), "markov_w1.weight" in self.tensors
        drafting = states if is_dspark and self.keys["sample_from_anchor"] else states[1:]
        previous, ids, confidences = anchor, [], []
        for state in drafting:
            row = state @ self.head().T
            if is_dspark:
                factor = self.tensors["markov_w1.weight"][previous]
                row = row + self.tensors["markov_w2.weight"] @ factor
                if self.keys["has_confidence_head"]:
                    logit = self.linear(torch.cat([state, factor]), "conf_proj") + self.tensors["conf_proj.bias"]
                    confidences.append(logit.sigmoid())
            previous = int(self.over_all(row).argmax())
            ids.append(previous)
        return ids, torch.cat(confidences) if confidences else None


class Eagle3Draft(GgufDraft):
    """`--spec-type draft-eagle3`: position p reads token p + 1 beside the fused states of p."""

    def draft(self, tokens_T, anchor, length):
        states = list(self.linear(self.states(tokens_T), "fc"))
        inputs, ids = [*tokens_T[1:].tolist(), anchor], []
        for _ in range(length):
            output = self.layer(torch.stack(states), torch.tensor(inputs))[-1]
            ids.append(int(self.over_all(self.linear(self.norm(output, "output_norm.weight"), "output")).argmax()))
            states.append(output)
            inputs.append(ids[-1])
        return ids

    def layer(self, states, inputs):
        positions = torch.arange(len(inputs))
        normed = self.norm(states, "blk.0.attn_norm_2.weight")
        both = torch.cat([self.norm(self.embed(inputs), "blk.0.attn_norm.weight"), normed], -1)
        q, k = (self.rotate(self.heads(both, f"blk.0.attn_{name}"), positions) for name in "qk")
        seen = positions[:, None] >= positions
        out = self.linear(self.attend(q, k, self.heads(both, "blk.0.attn_v"), seen), "blk.0.attn_output")
        x = (normed if self.keys["norm_before_residual"] else states) + out
        return x + self.mlp(self.norm(x, "blk.0.ffn_norm.weight"), "blk.0")


def write_tokenizer(folder: Path, vocab_size: int, **changes) -> None:
    """A byte-level BPE tokenizer.json of a few ids less than `vocab_size`, two merges, and three special tokens."""
    vocab = {f"t{i}": i for i in range(3, vocab_size - 4)}
    parsed = {
        "model": {"type": "BPE", "vocab": vocab, "merges": [["t", "3"], "t 4"]},
        "added_tokens": [{"id": i, "content": f"<s{i}>", "special": i != 2} for i in range(3)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    }
    (folder / "tokenizer.json").write_text(json.dumps({**parsed, **changes}))
