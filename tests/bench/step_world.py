# One training step of the block drafter in the benchmarks' setting, as several contestants do it: ours, the plain
# reference, and the speculators package (DSpark, in an environment of its own: see `make peers`). All train the same
# drafter on the same random states of a target of SmolLM2's sizes. This file imports nothing of ours at its top, so
# that a foreign environment can run it.

import json
import math
import resource
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

LAYER_IDS = (1, 7, 14, 20, 27)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Who takes a step, and on what. `draft_vocab` and `window` 0 = all."""

    who: str
    num_rows: int = 4
    lengths: tuple[int, int] = (300, 640)
    prompt: int = 60
    vocab: int = 49152
    draft_vocab: int = 0
    num_anchors: int = 48
    block_size: int = 7
    window: int = 0
    num_layers: int = 2
    rank: int = 64
    threads: int = 2
    confidence: bool = True
    compiled: bool = False


def states(setting: Setting) -> dict[str, torch.Tensor]:
    """Random conversations, packed: tokens [M], lengths [B], supervised [M], aux states [M, L, D], last states [M, D],
    and the output projection [V, D]."""
    generator = torch.Generator().manual_seed(0)
    low, high = setting.lengths
    share = torch.linspace(0, 1, setting.num_rows)
    lengths = (low + (high - low) * share).long()
    total = int(lengths.sum())
    supervised = torch.cat([torch.arange(int(length)) >= setting.prompt for length in lengths])
    weight = (torch.randn(setting.vocab, 576, generator=generator) * 0.1).bfloat16()
    return {
        "tokens": torch.randint(0, setting.vocab, (total,), generator=generator),
        "lengths": lengths,
        "supervised": supervised,
        "aux": torch.randn(total, len(LAYER_IDS), 576, generator=generator).bfloat16(),
        "last": torch.randn(total, 576, generator=generator).bfloat16(),
        "weight": weight,
    }


class OurStep:
    """One step of ours, or of the plain reference; `whose` says which."""

    def __init__(self, setting: Setting) -> None:
        from drafters.computing import Computing, computed_as
        from drafters.states import log_sum_exp
        from drafters.target import TargetHead
        from drafters.types import Batch
        from tests.bench.block_step import drafter_of, smollm2_spec
        from tests.bench.reference import reference_loss

        data = states(setting)
        spec = smollm2_spec(vocab_size=setting.vocab)
        self.head = TargetHead(spec, embedding_VD=data["weight"], lm_head_VD=data["weight"])
        self.drafter = drafter_of(spec, setting)
        self.computed_as, self.how = computed_as, Computing(compile_loss=setting.compiled)
        self.reference = reference_loss if setting.who == "reference" else None
        sizes = data["lengths"].tolist()

        def padded(packed: torch.Tensor) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(packed.split(sizes), batch_first=True)

        lse = log_sum_exp(self.head, data["last"])
        self.batch = Batch(
            tokens_BT=padded(data["tokens"]),
            lengths_B=data["lengths"],
            loss_mask_BT=padded(data["supervised"]),
            aux_BTLD=padded(data["aux"]),
            last_BTD=padded(data["last"]),
            lse_BT=padded(lse),
            layer_ids=LAYER_IDS,
            seeds=tuple(range(setting.num_rows)),
        )
        self.parameters = list(self.drafter.parameters())

    def loss(self) -> tuple[torch.Tensor, float]:
        with torch.autocast("cpu", torch.bfloat16), self.computed_as(self.how):
            if self.reference is not None:
                total, count = self.reference(self.drafter, self.batch, self.head)
            else:
                losses = self.drafter.loss(self.batch, self.head)
                total, count = losses.total, losses.count
        return total / count, float(count)


class SpeculatorsStep:
    """One step of speculators' DSpark: its model and its own eager losses, 0.1 CE + 0.9 TV + confidence, attention by
    `sdpa` under its dense mask (its default, compiled flex attention and Triton losses, wants a GPU). Weights that it
    takes from a target are set to our random ones."""

    def __init__(self, setting: Setting) -> None:
        import os

        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.losses import resolve_loss_config
        from speculators.models.dspark.config import DSparkSpeculatorConfig
        from speculators.models.dspark.core import DSparkDraftModel
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

        data, layer = states(setting), Qwen3Config(**qwen3_sizes(setting))
        layer._attn_implementation = "sdpa"
        proposal = GreedyTokenProposalConfig(speculative_tokens=setting.block_size)
        config = DSparkSpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=setting.draft_vocab or setting.vocab,
            block_size=setting.block_size,
            aux_hidden_state_layer_ids=list(LAYER_IDS),
            mask_token_id=5,
            markov_rank=setting.rank,
            enable_confidence_head=setting.confidence,
            confidence_head_with_markov=setting.confidence,
            speculators_config=SpeculatorsConfig(
                algorithm="dspark",
                proposal_methods=[proposal],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
        self.model = DSparkDraftModel(config)
        with torch.no_grad():
            kept = data["weight"][: config.draft_vocab_size].float()
            for head in (self.model.lm_head, self.model.verifier_lm_head):
                head.weight.copy_(kept)
            self.model.embed_tokens.weight.copy_(data["weight"].float())
            self.model.verifier_norm.weight.fill_(1.0)
        self.inputs = {
            "hidden_states": data["aux"].flatten(1)[None],
            "input_ids": data["tokens"][None],
            "loss_mask": data["supervised"][None].float(),
            "verifier_last_hidden_states": data["last"][None],
            "document_ids": torch.repeat_interleave(torch.arange(setting.num_rows), data["lengths"])[None],
            "position_ids": torch.cat([torch.arange(n) for n in data["lengths"].tolist()])[None],
            "loss_config": resolve_loss_config('{"ce": 0.1, "tv": 0.9}', "eager"),
            "tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0],
            "max_anchors": setting.num_anchors * setting.num_rows,
        }
        self.count = float(setting.num_anchors * setting.num_rows * setting.block_size)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def loss(self) -> tuple[torch.Tensor, float]:
        with torch.autocast("cpu", torch.bfloat16):
            _, loss, _ = self.model(**self.inputs)
        return loss, self.count


def qwen3_sizes(setting: Setting) -> dict[str, Any]:
    """SmolLM2's sizes for layers of Qwen3's shape."""
    return {
        "vocab_size": setting.vocab,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": setting.num_layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    }


def serve(setting: Setting) -> None:
    """Take as many steps as each line of stdin asks for; answers are lines of JSON."""
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    contestant = (SpeculatorsStep if setting.who == "speculators" else OurStep)(setting)
    optimizer = torch.optim.AdamW(contestant.parameters, lr=1e-4, fused=True)
    say({"ready": True, "resident_mb": peak_mb()})
    for line in sys.stdin:
        seconds, count = [], math.nan
        for _ in range(int(line)):
            begin = time.perf_counter()
            loss, count = contestant.loss()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(contestant.parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin)
        say({"seconds": seconds, "count": count, "peak_mb": peak_mb()})


def peak_mb() -> float:
    """Megabytes of this process at their highest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def say(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def as_argument(setting: Setting) -> str:
    return json.dumps(asdict(setting))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    serve(Setting(**{**given, "lengths": tuple(given["lengths"])}))
