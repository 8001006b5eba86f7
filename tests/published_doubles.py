# Tiny drafters as sources of an export, and readers of published folders that know nothing of our classes: they go by
# the config and the tensors of the folder, as an engine does, with torch's own attention.

import json
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from drafters.heads.eagle3 import Eagle3Drafter
from drafters.heads.medusa import MedusaDrafter
from drafters.target import FrozenTarget
from drafters.vocab import DraftVocab
from export.source import Source
from tests.block_doubles import GATED, MARKOV, RNN, make_drafter
from tests.contract_cases import shaken
from tests.tiny import tiny_llama

HEADS = {"parallel": None, "markov": MARKOV, "gated": GATED, "rnn": RNN}
EAGLE3_LAYERS = (0, 1, 2)
SIZES = {"intermediate_size": 64}  # so that groups of 32 divide every width


def saved_target(folder: Path, **sizes) -> FrozenTarget:
    """A tiny target whose weights also lie in `folder`."""
    model = tiny_llama(**{**SIZES, **sizes})
    model.save_pretrained(folder)
    return FrozenTarget.from_model(model, mask_token_id=3)


def drafter_of_family(family: str, target: FrozenTarget, *, reduced: bool, **settings):
    """A random drafter, every part of which acts."""
    if family in HEADS:
        settings = {
            "window": None,
            "sample_from_anchor": family != "parallel",
            "confidence": family != "parallel",
        } | settings
        return make_drafter(target, reduced=reduced, sequential=HEADS[family], **settings)
    vocab = DraftVocab(torch.arange(1, target.spec.vocab_size, 2), num_full=target.spec.vocab_size) if reduced else None
    size = vocab.size if vocab else None
    torch.manual_seed(1)
    if family == "eagle3":
        config = Eagle3Drafter.Config(
            **{"layer_ids": EAGLE3_LAYERS, "block_size": 4, **settings}, draft_vocab_size=size
        )
        return shaken(Eagle3Drafter(config, target.spec, vocab=vocab))
    config = MedusaDrafter.Config(**{"block_size": 3, "num_layers": 2, **settings}, draft_vocab_size=size)
    return shaken(MedusaDrafter(config, target.spec, vocab=vocab))


def source_of(drafter, *, target_folder: Path | None, spec=None) -> Source:
    node = {"_target_": f"{type(drafter).__module__}.{type(drafter).__qualname__}", **asdict(drafter.config)}
    return Source(
        folder=Path("drafter"),
        drafter=drafter.eval(),
        spec=spec or drafter.spec,
        node=node,
        provenance={},
        target_folder=target_folder,
    )


def stored(folder: Path):
    """Config and tensors of a folder."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


class Engine:
    """What every engine does: the target's rows, rotary tables from the config, norms."""

    def __init__(self, folder: Path, target: FrozenTarget) -> None:
        self.config, self.tensors = stored(folder)
        self.layers = self.config.get("transformer_layer_config", self.config)
        self.target = target
        self.d2t = self.tensors.get("d2t")
        embedding = target.model.get_input_embeddings().weight
        self.embedding_VD = self.tensors.get("embed_tokens.weight", embedding).float()
        self.head_VD = self.tensors.get("lm_head.weight", target.model.get_output_embeddings().weight).float()

    def hidden_states(self, tokens_T) -> tuple:
        """Index 0 is the embedding, k the input of layer k."""
        out = self.target.model(tokens_T[None], output_hidden_states=True)
        return tuple(state[0] for state in out.hidden_states)

    def norm(self, x, name: str):
        return F.rms_norm(x, (x.shape[-1],), self.tensors[f"{name}.weight"], self.layers["rms_norm_eps"])

    def linear(self, x, name: str):
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def heads(self, x, name: str):
        return self.linear(x, name).unflatten(-1, (-1, self.layers["head_dim"])).transpose(0, 1)

    def rotate(self, x_NTH, positions_T):
        theta, size = self.layers["rope_parameters"]["rope_theta"], self.layers["head_dim"]
        angles = positions_T[:, None] * theta ** (-torch.arange(0, size, 2) / size)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        first, second = x_NTH.chunk(2, -1)
        return x_NTH * cos + torch.cat([-second, first], -1) * sin

    def attend(self, q, k, v, mask):
        groups = self.layers["num_attention_heads"] // self.layers["num_key_value_heads"]
        out = F.scaled_dot_product_attention(q, k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0), mask)
        return out.transpose(0, 1).flatten(1)

    def mlp(self, x, prefix: str):
        gate, up = self.linear(x, f"{prefix}.gate_proj"), self.linear(x, f"{prefix}.up_proj")
        return self.linear(F.silu(gate) * up, f"{prefix}.down_proj")

    def target_ids(self, draft_ids):
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]


class BlockEngine(Engine):
    """DFlash and DSpark: keys and values of the context come from `hidden_norm(fc(states))` in every layer. `seen` says
    which context positions a slot sees: "engine" counts the slot itself, "trainer" from the anchor."""

    def layer_states(self, tokens_T):
        states = self.hidden_states(tokens_T)
        if "aux_hidden_state_layer_ids" in self.config:
            return torch.cat([states[k] for k in self.config["aux_hidden_state_layer_ids"]], -1)
        return torch.cat([states[k + 1] for k in self.config["target_layer_ids"]], -1)

    def slots(self, tokens_T, anchor: int, *, seen: str = "engine"):
        """States of all slots of a block after `tokens_T`, after the final norm."""
        size, position = self.config["block_size"], len(tokens_T)
        context = self.norm(self.linear(self.layer_states(tokens_T), "fc"), "hidden_norm")
        before, slots = torch.arange(position), position + torch.arange(size)
        mask = torch.ones(size, position + size, dtype=torch.bool)
        if (window := self.layers.get("sliding_window")) is not None:
            oldest = slots - window + 1 if seen == "engine" else (slots[:1] - window).expand(size)
            mask[:, :position] = before >= oldest[:, None]
        x = self.embedding_VD[torch.tensor([anchor] + [self.config["mask_token_id"]] * (size - 1))]
        for index in range(self.layers["num_hidden_layers"]):
            name = f"layers.{index}.self_attn"
            y = self.norm(x, f"layers.{index}.input_layernorm")
            q = self.rotate(self.norm(self.heads(y, f"{name}.q_proj"), f"{name}.q_norm"), slots)
            k = self.rotate(self.norm(self.heads(y, f"{name}.k_proj"), f"{name}.k_norm"), slots)
            k_seen = self.rotate(self.norm(self.heads(context, f"{name}.k_proj"), f"{name}.k_norm"), before)
            v = torch.cat([self.heads(context, f"{name}.v_proj"), self.heads(y, f"{name}.v_proj")], 1)
            x = x + self.linear(self.attend(q, torch.cat([k_seen, k], 1), v, mask), f"{name}.o_proj")
            x = x + self.mlp(self.norm(x, f"layers.{index}.post_attention_layernorm"), f"layers.{index}.mlp")
        return self.norm(x, "norm")

    def draft(self, tokens_T, anchor: int, **seen):
        """Greedy draft: target ids, logits over the draft vocabulary, confidences (None without a head)."""
        states = self.slots(tokens_T, anchor, **seen)
        drafting = states if self.config["sample_from_anchor"] else states[1:]
        previous, state, ids, logits, confidences = anchor, None, [], [], []
        for hidden in drafting:
            row = hidden @ self.head_VD.T * self.layers.get("logit_scale", 1.0)
            if "markov_rank" in self.config:
                embedded = self.tensors["markov_head.markov_w1.weight"][previous]
                state, factor = self.factor(state, embedded, hidden)
                row = row + self.tensors["markov_head.markov_w2.weight"] @ factor
                if self.config["enable_confidence_head"]:
                    confidences.append(self.linear(torch.cat([hidden, embedded]), "confidence_head.proj").sigmoid())
            previous = int(self.target_ids(row.argmax()))
            ids.append(previous)
            logits.append(row)
        return ids, torch.stack(logits), torch.stack(confidences)[:, 0] if confidences else None

    def factor(self, state, embedded, hidden):
        kind = self.config["markov_head_type"]
        if kind == "vanilla":
            return None, embedded
        if kind == "gated":
            gate = self.linear(torch.cat([hidden, embedded]), "markov_head.gate_proj").sigmoid()
            return None, gate * embedded
        state = torch.zeros_like(embedded) if state is None else state
        joint = self.linear(torch.cat([state, embedded, hidden]), "markov_head.joint_proj")
        gate, candidate, output = joint.chunk(3)
        return gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh(), output.tanh()


class Eagle3Engine(Engine):
    """Row i reads token i + 1 beside the fused states of position i; later steps read the layer's own output."""

    def __init__(self, folder: Path, target: FrozenTarget, *, layer: str) -> None:
        super().__init__(folder, target)
        self.layer = layer

    def draft(self, tokens_T, anchor: int, length: int):
        states = self.hidden_states(tokens_T)
        fused = torch.cat([states[k] for k in self.config["eagle_aux_hidden_state_layer_ids"]], -1)
        hidden = list(self.linear(fused, "fc"))
        inputs = [*tokens_T[1:].tolist(), anchor]
        ids, logits = [], []
        for _ in range(length):
            output = self.step(torch.stack(hidden), torch.tensor(inputs))
            row = self.norm(output[-1], "norm") @ self.head_VD.T
            ids.append(int(self.target_ids(row.argmax())))
            logits.append(row)
            hidden.append(output[-1])
            inputs.append(ids[-1])
        return ids, torch.stack(logits)

    def step(self, hidden, inputs):
        """The layer's outputs of all rows, causal."""
        name, positions = self.layer, torch.arange(len(inputs))
        normed = self.norm(hidden, f"{name}.hidden_norm")
        both = torch.cat([self.norm(self.embedding_VD[inputs], f"{name}.input_layernorm"), normed], -1)
        q = self.rotate(self.heads(both, f"{name}.self_attn.q_proj"), positions)
        k = self.rotate(self.heads(both, f"{name}.self_attn.k_proj"), positions)
        v = self.heads(both, f"{name}.self_attn.v_proj")
        residual = normed if self.config["norm_before_residual"] else hidden
        mask = positions[:, None] >= positions
        x = residual + self.linear(self.attend(q, k, v, mask), f"{name}.self_attn.o_proj")
        return x + self.mlp(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
