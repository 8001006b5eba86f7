# Decoding to look at. The text as it comes, coloured by who wrote each token, or one line a round with the
# drafts that were rejected. Colours are Okabe and Ito's, which colour-blind people tell apart, as backgrounds under
# black text, which dark and light terminals both show. Without colour, marks say the same.

import time
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text
from torch import Tensor

from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.metrics import accepted_length
from drafters.decoding.records import Generation, Round, RunTimings
from drafters.errors import ConfigError
from drafters.heads.base import Drafter

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["TokenText", "printable", "watch"]

# Two shades of each, for rounds in turn.
DRAFTED = ("black on #56b4e9", "black on #a6d5f2")
OWN = ("black on #e69f00", "black on #f5cd75")
REJECTED = "dim strike"


def watch(
    target: "FrozenTarget",
    drafter: Drafter | None,
    prompt: Tensor,
    config: DecodeConfig,
    console: Console,
    *,
    rounds: bool = False,
) -> Generation:
    """Continue `prompt` (int64 ids [T]) and print every token as it comes, with a legend before and a summary after.

    `rounds` prints one line a round instead, with the drafts that were rejected. Seconds spent on printing do not
    count. Raises ConfigError for a target without a tokenizer, and what `decode` raises.
    """
    if target.tokenizer is None:
        raise ConfigError("target: it has no tokenizer, so its tokens have no text; give one with a tokenizer.json")
    screen = _Screen(target.tokenizer, console, by_round=rounds, is_tree=config.tree is not None)
    # The first token belongs to no round, and is printed first: ask for it alone.
    first = decode(target, drafter, [prompt], replace(config, max_new_tokens=1))[0]
    screen.begin(first.tokens)
    timings = RunTimings()
    (generation,) = decode(target, drafter, [prompt], config, on_round=screen.on_round, timings=timings)
    screen.end(generation, timings)
    return generation


class TokenText:
    """The text of a growing list of tokens, piece by piece: the pieces, joined, are the tokenizer's decoding of all.

    A token that ends inside a character gives its complete characters only; the rest comes with the token that
    completes it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._length = 0  # characters given so far

    def add(self, token: int) -> str:
        """What this token adds to the text."""
        self._tokens.append(token)
        return self._give(self._decoded().rstrip("\ufffd"))

    def rest(self) -> str:
        """What was held back: bytes that no token completed."""
        return self._give(self._decoded())

    def alone(self, tokens: Sequence[int]) -> str:
        """What these tokens would add, without adding them."""
        return self._decoded(tokens)[self._length :]

    def _decoded(self, more: Sequence[int] = ()) -> str:
        return str(self._tokenizer.decode([*self._tokens, *more], clean_up_tokenization_spaces=False))

    def _give(self, text: str) -> str:
        piece = text[self._length :]
        self._length = max(self._length, len(text))
        return piece


def printable(text: str) -> str:
    """Control characters but line ends and tabs as escapes: the terminal obeys none that a text holds."""
    for control in {c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\t"}:
        text = text.replace(control, control.encode("unicode_escape").decode())
    return text


class _Screen:
    """Prints rounds on a console. `by_round`: a line for each. `is_tree`: drafts are a tree's, not a chain."""

    def __init__(self, tokenizer: Any, console: Console, *, by_round: bool, is_tree: bool) -> None:
        self._console, self._by_round, self._is_tree = console, by_round, is_tree
        self._has_colour = console.color_system is not None and not console.no_color
        self._text = TokenText(tokenizer)
        self._num_rounds = 0
        self._seconds = 0.0

    def begin(self, tokens: Sequence[int]) -> None:
        """Legend, and the tokens before the first round."""
        drafted, own = self._piece("drafted", DRAFTED, "⟦⟧"), self._piece("the target's own", OWN)
        legend = Text.assemble(drafted, " ", own)
        if self._by_round:
            legend.append_text(Text.assemble("  ", self._piece("rejected", (REJECTED,), "✗⟦⟧")))
        elif not self._has_colour:
            legend.append("  ╎ a round ends")
        else:
            legend.append("  shades take turns by round")
        self._print(legend, end="\n")
        own = self._piece("".join(map(self._text.add, tokens)), OWN)
        self._print(Text.assemble("   0  first token  ", own) if self._by_round else own)
        self._end_line_or_mark()

    def on_round(self, prompt: int, done: Round, tokens: list[int], drafts: list[int]) -> None:
        """What `decode` calls."""
        del prompt
        started = time.perf_counter()
        self._num_rounds += 1
        kept = min(done.accepted, len(tokens))
        drafted = "".join(map(self._text.add, tokens[:kept]))
        # Here, since rejected drafts stood behind the accepted ones, where the target's own token comes now.
        rejected = self._rejected(done, drafts) if self._by_round else []
        own = "".join(map(self._text.add, tokens[kept:]))
        line = Text.assemble(self._piece(drafted, DRAFTED, "⟦⟧"), self._piece(own, OWN))
        if self._by_round:
            line = Text.assemble(f"{self._num_rounds:4}  {done.accepted:2} of {done.proposed:2}     ", line)
            for text in rejected:
                line.append_text(Text.assemble(" ", self._piece(text, (REJECTED,), "✗⟦⟧")))
        self._print(line)
        self._end_line_or_mark()
        self._seconds += time.perf_counter() - started

    def end(self, generation: Generation, timings: RunTimings) -> None:
        """What was held back, and the summary."""
        self._print(self._piece(self._text.rest(), OWN), end="\n")
        seconds = timings.decode_s - self._seconds
        facts = [f"{len(generation.rounds)} rounds", f"{len(generation.tokens)} tokens"]
        if any(done.full for done in generation.rounds):
            facts.append(f"accepted length {accepted_length(generation.rounds):.2f} (bonus included)")
        if generation.rounds and seconds > 0:
            facts.append(f"{(len(generation.tokens) - 1) / seconds:.1f} tokens/s")
        self._print(Text(", ".join(facts), style="bold"), end="\n")

    def _rejected(self, done: Round, drafts: list[int]) -> list[str]:
        """The drafts that did not stand: the end of a chain as one text, each of a tree by itself."""
        if self._is_tree:
            return [self._text.alone([token]) for slot, token in enumerate(drafts) if slot not in done.slots]
        rest = drafts[done.accepted :]
        return [self._text.alone(rest)] if rest else []

    def _piece(self, text: str, styles: Sequence[str], marks: str = "") -> Text:
        """Text in the style of this round; without colour between marks. Empty where there is none."""
        # Line ends with a sign; alone where a round has one line.
        shown = printable(text).replace("\n", "↵" if self._by_round else "↵\n")
        if not shown:
            return Text()
        if self._has_colour:
            return Text(shown, style=styles[self._num_rounds % len(styles)])
        return Text(f"{marks[:-1]}{shown}{marks[-1:]}")

    def _end_line_or_mark(self) -> None:
        if self._by_round:
            self._print(Text(), end="\n")
        elif not self._has_colour:
            self._print(Text("╎"))

    def _print(self, text: Text, end: str = "") -> None:
        self._console.print(text, end=end, soft_wrap=True, highlight=False)
