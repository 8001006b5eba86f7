# Are the answers the target's own? Measured on a few: how likely the target finds their tokens, beside answers that it
# writes now to the same prompts. Of text that a model draws itself at temperature 1 the mean of -log p is its entropy,
# exactly; below temperature 1 it is less. What is above it was written by somebody else.

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from data.doctor.case import Case
    from drafters.target import FrozenTarget
    from drafters.types import Example

__all__ = ["EXCESS", "Likelihood", "check", "likelihood", "openings"]

EXCESS = 0.1  # nats a token above the entropy
ERRORS = 3.0  # standard errors above it
ROWS = 64  # positions whose logits are in memory at a time


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """What a target thinks of `num_tokens` tokens: the share that is its likeliest one, the mean of log p, and the mean
    of -log p - H, its surprise beyond the entropy H, in nats, with its standard error if the target had drawn them."""

    num_tokens: int
    likeliest: float
    log_p: float
    excess: float
    error: float

    @property
    def is_foreign(self) -> bool:
        """Whether somebody else must have written them, or the target at a temperature above 1."""
        return self.excess > EXCESS and self.excess > ERRORS * self.error


@torch.inference_mode()
def likelihood(target: "FrozenTarget", rows: Sequence[tuple[Tensor, int]]) -> Likelihood:
    """Of the tokens from `start` on of each row (tokens [T], start), start 1 or more."""
    from drafters.types import Needs

    padded_BT = torch.nn.utils.rnn.pad_sequence([tokens_T for tokens_T, _ in rows], batch_first=True)
    last_BTD = target.states(padded_BT, needs=Needs(last=True)).last_BTD
    assert last_BTD is not None
    sums_4 = torch.zeros(4, dtype=torch.float64)
    for last_TD, (tokens_T, start) in zip(last_BTD, rows, strict=True):
        hidden_ND, said_N = last_TD[start - 1 : len(tokens_T) - 1], tokens_T[start:].to(last_TD.device)
        for part_RD, said_R in zip(hidden_ND.split(ROWS), said_N.split(ROWS), strict=True):
            log_RV = target.head.logits(part_RD).log_softmax(dim=-1)
            p_RV = log_RV.exp()
            entropy_R = -(p_RV * log_RV).sum(dim=-1)
            variance_R = (p_RV * log_RV.square()).sum(dim=-1) - entropy_R.square()
            log_p_R = log_RV.gather(1, said_R[:, None])[:, 0]
            hit_R = log_RV.argmax(dim=-1) == said_R
            sums_4 += torch.stack([one.double().sum().cpu() for one in (hit_R, log_p_R, entropy_R, variance_R)])
    count = sum(len(tokens_T) - start for tokens_T, start in rows)
    hits, log_p, entropy, variance = sums_4.tolist()
    return Likelihood(
        num_tokens=count,
        likeliest=hits / count,
        log_p=log_p / count,
        excess=(-log_p - entropy) / count,
        error=math.sqrt(max(variance, 0.0)) / count,
    )


def openings(examples: "Sequence[Example]", count: int, most: int) -> list[tuple[Tensor, int]]:
    """(tokens, start) of the first answers of `count` evenly spaced examples, at most `most` tokens of each."""
    chosen = [examples[i * len(examples) // count] for i in range(min(count, len(examples)))]
    rows = []
    for one in chosen:
        start = int(one.loss_mask_T.int().argmax())
        run = one.loss_mask_T[start:].int().cumprod(0).sum()
        if start > 0:
            rows.append((one.tokens_T[: start + min(int(run), most)], start))
    return rows


def check(case: "Case") -> None:
    """Measure a few answers of the conversations, and as many of the target's own."""
    findings, config = case.findings, case.config
    if case.target is None or not case.splits or config.num_answers == 0:
        reason = "num_answers=0" if config.num_answers == 0 else "the target or the conversations are not there"
        findings.note("answers/likelihood", f"not measured: {reason}")
        return
    with findings.watched("answers/likelihood"):
        held_out = case.splits["validation"]
        examples = held_out if len(held_out) >= config.num_answers else case.examples
        rows = openings(examples, config.num_answers, config.max_new_tokens)
        if rows:
            given = likelihood(case.target, rows)
            _judge(case, len(rows), given, likelihood(case.target, _answered(case, rows)))
        else:
            findings.note("answers/likelihood", "not measured: no answer has a prompt before it")


def _answered(case: "Case", rows: Sequence[tuple[Tensor, int]]) -> list[tuple[Tensor, int]]:
    """What the target answers to the same prompts, as data.regenerate lets it."""
    from data.engines.answers import RegenerateConfig
    from drafters.decoding.loop import DecodeConfig, decode
    from drafters.types import Sampling

    assert case.target is not None
    prompts = [tokens_T[:start] for tokens_T, start in rows]
    room = case.target.spec.max_position - max(map(len, prompts))
    drawn = DecodeConfig(
        max_new_tokens=min(case.config.max_new_tokens, room),
        sampling=Sampling(temperature=RegenerateConfig().temperature),
        batch_size=len(prompts),
    )
    made = decode(case.target, None, prompts, drawn)
    return [
        (torch.cat([prompt, torch.tensor(one.tokens)]), len(prompt)) for prompt, one in zip(prompts, made, strict=True)
    ]


def _judge(case: "Case", count: int, given: Likelihood, own: Likelihood) -> None:
    from data.engines.answers import RegenerateConfig

    def told(one: Likelihood) -> str:
        return f"{one.likeliest:.0%} of their tokens are the target's likeliest, mean log p {one.log_p:.2f}"

    found = (
        f"{count} answers, {given.num_tokens:,} tokens: {told(given)}; its own, at temperature "
        f"{RegenerateConfig().temperature}, to the same prompts: {told(own)}. Surprise "
        f"{given.excess:+.2f} nats a token beyond the target's entropy, which at temperature 1 it is itself (standard "
        f"error {given.error:.2f}; foreign above {EXCESS} and {ERRORS:.0f} errors)"
    )
    if given.is_foreign:
        lost = max(0.0, 1 - given.likeliest / own.likeliest) if own.likeliest else 0.0
        advice = "python -m data.regenerate lets the target answer the prompts; train on these answers"
        case.findings.warning("answers/likelihood", found, advice, cost=lost)
    else:
        case.findings.ok("answers/likelihood", found)
