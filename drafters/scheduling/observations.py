# What calibration learns from: of every full round, what the drafter said of its drafts and how many were accepted.
# A small table that can be stored, so that a drafter is decoded once and calibrated, judged and simulated many times.

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafters.checkpoint import write_whole
from drafters.decoding.metrics import full_rounds
from drafters.decoding.records import Round
from drafters.errors import DataError
from drafters.files import save_tensors

__all__ = ["Observations"]

SCHEMA = 3
AGAIN = "decode the prompts again"
TYPES = {
    "confidence_NG": torch.float64,
    "likeliest_NG": torch.float64,
    "accepted_N": torch.int64,
    "proposed_N": torch.int64,
    "prompt_N": torch.int64,
    "context_N": torch.int64,
}


@dataclass(frozen=True, kw_only=True)
class Observations:
    """N full rounds of up to G drafts. `confidence_NG`: the drafter's own confidence, conditional (draft k stands,
    given that 1..k-1 do), `likeliest_NG` how probable its likeliest token was; both NaN beyond `proposed_N`.
    `prompt_N`: which prompt a round is of; rounds of a prompt follow each other in order. `context_N`: tokens of the
    text before the round, the anchor included. Raises DataError for other types, shapes or values, and for no rounds at
    all."""

    confidence_NG: Tensor
    likeliest_NG: Tensor
    accepted_N: Tensor
    proposed_N: Tensor
    prompt_N: Tensor
    context_N: Tensor

    def __post_init__(self) -> None:
        if problem := _problem(vars(self)):
            raise DataError(f"observations: {problem}; {AGAIN}")

    @classmethod
    def of_rounds(cls, prompts: Iterable[Iterable[Round]], num_slots: int) -> "Observations":
        """The full rounds among the rounds of each prompt. Prompts are numbered as they come, those without a full
        round too. Raises DataError when there are none, or one lacks its confidences or proposes over `num_slots`."""
        rounds = [(prompt, r) for prompt, of_prompt in enumerate(prompts) for r in full_rounds(of_prompt)]
        if not rounds:
            raise DataError(
                "observations: no full round; rounds that the token limit or a stop token cut do not count: "
                "give more prompts, or a higher max_new_tokens"
            )
        for prompt, r in rounds:
            if len(r.confidences) != r.proposed or len(r.likeliest) != r.proposed:
                raise DataError(
                    f"observations: a round of prompt {prompt} has {r.proposed} drafts and {len(r.confidences)} "
                    "confidences; accepted: one a draft: use a drafter with confidence, and record them"
                )
            if r.proposed > num_slots:
                raise DataError(
                    f"observations: a round of prompt {prompt} has {r.proposed} drafts; accepted: at most {num_slots}"
                )

        def padded(values: list[tuple[float, ...]]) -> Tensor:
            rows = [[*row, *[float("nan")] * (num_slots - len(row))] for row in values]
            return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), num_slots)

        return cls(
            confidence_NG=padded([r.confidences for _, r in rounds]),
            likeliest_NG=padded([r.likeliest for _, r in rounds]),
            accepted_N=torch.tensor([r.accepted for _, r in rounds]),
            proposed_N=torch.tensor([r.proposed for _, r in rounds]),
            prompt_N=torch.tensor([prompt for prompt, _ in rounds]),
            context_N=torch.tensor([r.context for _, r in rounds]),
        )

    @property
    def num_rounds(self) -> int:
        return self.confidence_NG.shape[0]

    @property
    def num_slots(self) -> int:
        return self.confidence_NG.shape[1]

    @property
    def counted_NG(self) -> Tensor:
        """Draft k was proposed."""
        return self.proposed_N[:, None] >= self._positions_G

    @property
    def survived_NG(self) -> Tensor:
        """Drafts 1..k were accepted."""
        return self.accepted_N[:, None] >= self._positions_G

    @property
    def reached_NG(self) -> Tensor:
        """Draft k was proposed, and drafts 1..k-1 were accepted."""
        return self.counted_NG & (self.accepted_N[:, None] >= self._positions_G - 1)

    @property
    def _positions_G(self) -> Tensor:
        return torch.arange(1, self.num_slots + 1)

    def by(self, signal: str) -> "Observations":
        """The same rounds, whose confidence is one of SIGNALS."""
        return replace(self, confidence_NG=self.likeliest_NG) if signal == "likeliest" else self

    def where(self, kept_N: Tensor) -> "Observations":
        """The rounds where `kept_N` is True."""
        return Observations(**{name: values[kept_N] for name, values in vars(self).items()})

    def save(self, path: Path) -> Path:
        """Write a safetensors file, replacing it atomically. Raises CheckpointError when it cannot be written."""
        return write_whole(path, lambda temp: save_tensors({"schema": torch.tensor(SCHEMA), **vars(self)}, temp))

    @classmethod
    def load(cls, path: Path) -> "Observations":
        """Read what `save` wrote. Raises DataError when the file is missing, damaged or of another schema."""
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path}: cannot be read: {error}; {AGAIN}") from error
        schema = tensors.pop("schema", None)
        found = None if schema is None or schema.numel() != 1 else schema.item()
        if found != SCHEMA:
            raise DataError(f"{path}: schema is {found}; this version reads {SCHEMA}; {AGAIN}")
        if set(tensors) != set(TYPES):
            raise DataError(f"{path}: holds {sorted(tensors)}; accepted: {sorted(TYPES)}; {AGAIN}")
        try:
            return cls(**tensors)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error


def _problem(tensors: dict[str, Tensor]) -> str | None:
    """What is wrong with the tensors of Observations, if anything."""
    for name, dtype in TYPES.items():
        if tensors[name].dtype != dtype:
            return f"{name} is {tensors[name].dtype}, accepted: {dtype}"
        if tensors[name].ndim != len(name.split("_")[1]):
            return f"{name} has shape {list(tensors[name].shape)}"
    confidence_NG, likeliest_NG, accepted_N, proposed_N, prompt_N, context_N = (tensors[name] for name in TYPES)
    num_rounds, num_slots = confidence_NG.shape
    if likeliest_NG.shape != confidence_NG.shape:
        return f"likeliest_NG has shape {list(likeliest_NG.shape)}, confidence_NG {list(confidence_NG.shape)}"
    if not num_rounds or not num_slots:
        return f"{num_rounds} rounds of {num_slots} drafts, accepted: 1 or more of each"
    if any(len(values_N) != num_rounds for values_N in (accepted_N, proposed_N, prompt_N, context_N)):
        return f"confidence_NG has {num_rounds} rounds, another tensor has not"
    if (accepted_N < 0).any() or (accepted_N > proposed_N).any() or (proposed_N > num_slots).any():
        return f"accepted and proposed drafts do not fit 0 <= accepted <= proposed <= {num_slots}"
    if (prompt_N < 0).any() or (context_N < 0).any():
        return "prompt_N or context_N has negative numbers, accepted: 0 or more"
    counted_NG = proposed_N[:, None] > torch.arange(num_slots)
    for said_NG in (confidence_NG, likeliest_NG):
        is_right_NG = torch.where(counted_NG, (said_NG >= 0) & (said_NG <= 1), said_NG.isnan())
        if not is_right_NG.all():
            return "a confidence is not in 0..1 where a draft was proposed, or not NaN where none was"
    return None
