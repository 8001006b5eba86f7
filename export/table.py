# Which engine loads what, as data: family of drafter x vocabulary x format x engine. The formats refuse by it, the
# README shows it, so that neither can say what the other does not. Engines: vLLM 0.32 and 0.33, SGLang 0.5.23,
# llama.cpp b11434; "drafters" is this project.

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from drafters.errors import ConfigError
from export.families import FAMILIES

__all__ = ["ENGINES", "FORMATS", "VOCABULARIES", "Verdict", "alternatives", "check", "refusal", "render", "verdicts"]

VOCABULARIES = ("full", "reduced")
# Engines that read a format at all.
ENGINES = {
    "hf": ("vLLM", "SGLang", "llama.cpp"),
    "speculators": ("vLLM", "SGLang", "llama.cpp"),
    "gguf": ("llama.cpp",),
    "mtp": ("vLLM", "SGLang", "llama.cpp"),
    "packed": ("drafters",),
}
FORMATS = tuple(ENGINES)
TRAINED = ("parallel", "markov", "gated", "rnn", "eagle3", "medusa", "mtp", "exit")


@dataclass(frozen=True)
class Verdict:
    """Whether an engine loads it; `says` is the condition under which it does, or the reason why it does not."""

    loads: bool
    says: str = ""


YES, OLD = Verdict(True), Verdict(True, "up to 0.32")
_WHOLE_HEAD = "it has no draft vocabulary here: it would take the target's head over the whole vocabulary"
_WHOLE_MARKOV = "its Markov head is over the whole vocabulary"
_VANILLA = "it knows the plain Markov head only"
_LAYERS = "no engine drafts with a target's own first layers"
_NOT_MTP = "no engine loads its modules apart from the target: to=mtp puts them into a copy of it"
_NO_MEDUSA = "it has no Medusa"
_THREE = "with three layers in drafter.layer_ids"
_MODEL = "it is a model already: give its own folder to the engine"
_NGRAM = "it has no weights: engines have prompt look-up of their own"
_OWN = "engines know no class of your own"


def verdicts(to: str, family: str, vocabulary: str) -> dict[str, Verdict]:
    """What each engine of format `to` makes of such a drafter."""
    found = _everywhere(to, family)
    if found is not None:
        return dict.fromkeys(ENGINES[to], found)
    ask = {"hf": _hf, "speculators": _speculators, "gguf": _gguf, "mtp": _mtp}[to]
    return {engine: ask(engine, family, vocabulary == "reduced") for engine in ENGINES[to]}


def _everywhere(to: str, family: str) -> Verdict | None:
    """The verdict where neither engine nor vocabulary matters."""
    if family in ("draft_model", "ngram"):
        return Verdict(False, _MODEL if family == "draft_model" else _NGRAM)
    if to == "packed":
        return YES
    if family in ("exit", "own"):
        return Verdict(False, _LAYERS if family == "exit" else _OWN)
    if family == "mtp" and to != "mtp":
        return Verdict(False, _NOT_MTP)
    return None


def _hf(engine: str, family: str, reduced: bool) -> Verdict:
    if family == "medusa":
        if engine != "vLLM":
            return Verdict(False, _NO_MEDUSA)
        return Verdict(False, "its loader takes the map of draft ids for a missing weight") if reduced else OLD
    if family == "eagle3":
        conditions = {"SGLang": "with drafter.norm_before_residual=false", "llama.cpp": _THREE}
        return Verdict(True, conditions.get(engine, ""))
    if family in ("gated", "rnn"):
        if engine != "SGLang":
            return Verdict(False, _VANILLA)
        return Verdict(False, _WHOLE_MARKOV) if reduced else YES
    if not reduced or engine == "vLLM":
        return YES
    if engine == "SGLang":
        return Verdict(False, _WHOLE_MARKOV if family == "markov" else _WHOLE_HEAD)
    return YES if family == "markov" else Verdict(False, "its converter knows no DFlash of a reduced vocabulary")


def _speculators(engine: str, family: str, reduced: bool) -> Verdict:
    if engine == "SGLang":
        return Verdict(False, "it does not read this format")
    if family == "medusa":
        return Verdict(False, "this format has no Medusa")
    if family in ("gated", "rnn"):
        return Verdict(False, _VANILLA)
    if family == "parallel" and engine == "llama.cpp":
        return Verdict(False, "its converter knows no DFlash of this format")
    return Verdict(True, _THREE) if (family, engine) == ("eagle3", "llama.cpp") else YES


def _gguf(engine: str, family: str, reduced: bool) -> Verdict:
    if family in ("gated", "rnn", "medusa"):
        return Verdict(False, _NO_MEDUSA if family == "medusa" else _VANILLA)
    return Verdict(True, _THREE) if family == "eagle3" else YES


def _mtp(engine: str, family: str, reduced: bool) -> Verdict:
    if family != "mtp":
        return Verdict(False, "only modules for multi-token prediction go into a target")
    if reduced:
        return Verdict(False, "these modules draft over the target's whole vocabulary")
    others = "" if engine == "llama.cpp" else "DeepSeek-V3, MiMo, "
    return Verdict(True, f"in a target of the kind of {others}GLM-4-MoE, Qwen3-Next or Qwen3.5")


def refusal(to: str, family: str, vocabulary: str) -> str | None:
    """Why no engine loads such a drafter in format `to`; None where one does."""
    found = verdicts(to, family, vocabulary)
    if any(one.loads for one in found.values()):
        return None
    reasons: dict[str, list[str]] = {}
    for engine, one in found.items():
        reasons.setdefault(one.says, []).append(engine)
    return "; ".join(f"{', '.join(engines)}: {says}" for says, engines in reasons.items())


def alternatives(family: str, vocabulary: str, *, to: str = "") -> str:
    """The formats other than `to` in which an engine loads such a drafter, each with its engines."""
    found = []
    for other in FORMATS:
        engines = [name for name, one in verdicts(other, family, vocabulary).items() if one.loads]
        if other != to and engines:
            found.append(f"to={other} ({', '.join(engines)})")
    return ", ".join(found) or "none"


def check(to: str, family: str, vocabulary: str) -> None:
    """Raises ConfigError, with what is accepted instead, where no engine loads such a drafter in format `to`."""
    reason = refusal(to, family, vocabulary)
    if reason is None:
        return
    what = f"{family} with a {vocabulary} vocabulary" if family in TRAINED else f"{family}"
    advice = ""
    if vocabulary == "reduced" and refusal(to, family, "full") is None:
        advice = "; or train it again with drafter.draft_vocab_size=null"
    raise ConfigError(
        f"to={to}: got a drafter of the family {what}, which no engine loads in this format ({reason}); accepted for "
        f"it: {alternatives(family, vocabulary, to=to)}{advice}"
    )


def render() -> str:
    """The table as Markdown: a row for each family and vocabulary, a column for each format, and the reasons below."""
    notes: dict[str, int] = {}
    lines = ["| family | vocabulary | " + " | ".join(f"`to={to}`" for to in FORMATS) + " |"]
    lines.append("|---|---|" + "---|" * len(FORMATS))
    for family, vocabulary in _rows():
        cells = [_cell(verdicts(to, family, vocabulary.split(",")[0]), notes) for to in FORMATS]
        lines.append(f"| `{family}` | {vocabulary} | " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"{number}. {says[0].upper()}{says[1:]}." for says, number in notes.items()]
    return "\n".join(lines)


def _rows() -> Iterator[tuple[str, str]]:
    """Families and vocabularies; one row where the vocabulary does not matter."""
    for family in FAMILIES:
        if all(verdicts(to, family, "full") == verdicts(to, family, "reduced") for to in FORMATS):
            yield family, "full, reduced" if family in TRAINED else "full"
        else:
            yield from product((family,), VOCABULARIES)


def _cell(found: dict[str, Verdict], notes: dict[str, int]) -> str:
    """Engines that load it, those that do not struck out, each with the number of what is said of it."""
    if len(set(found.values())) == 1 and not next(iter(found.values())).loads:
        says = next(iter(found.values())).says
        return f"no ({notes.setdefault(says, len(notes) + 1)})"
    parts = []
    for engine, one in found.items():
        number = f" ({notes.setdefault(one.says, len(notes) + 1)})" if one.says else ""
        parts.append(f"{engine if one.loads else f'~~{engine}~~'}{number}")
    return ", ".join(parts)
