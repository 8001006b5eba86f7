# What a program that decodes imports as `drafters`: a target of the settings of conf/, and texts that it writes with a
# drafter. Training is `drafters.fit`, in training/library.py, so that decoding alone never loads Lightning.

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drafters.chat import ChatEncoder
from drafters.config import to_plain
from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.metrics import accepted_length
from drafters.decoding.records import Generation
from drafters.door import load_target as load_node
from drafters.errors import ConfigError, DataError
from drafters.given import Messages, to_messages
from drafters.heads.base import Drafter

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["Generated", "generate", "load_target", "plain_settings"]


def plain_settings(settings: Mapping[str, Any], *needed: str) -> dict[str, Any]:
    """Settings without interpolations. Raises ConfigError where one that is `needed` is missing."""
    plain = to_plain(settings)
    if not isinstance(plain, Mapping):
        raise ConfigError(f"settings: got {type(settings).__name__}; accepted: what Hydra composes of drafters.conf")
    missing = [name for name in needed if name not in plain]
    if missing:
        raise ConfigError(
            f"{missing[0]}: missing; compose the settings with Hydra: compose('fit', [...]) of drafters.conf"
        )
    return {str(name): to_plain(value) for name, value in plain.items()}


def load_target(settings: Mapping[str, Any]) -> "FrozenTarget":
    """The target that the settings of a run describe, fetched, loaded and checked, on the device that they name
    (`data.target_device`, else `device`, else a GPU if there is one).

    Raises ConfigError or CheckpointError with the key at fault.
    """
    plain = plain_settings(settings, "target")
    data = plain.get("data")
    own = data.get("target_device") if isinstance(data, Mapping) else None
    if not isinstance(plain["target"], Mapping):
        raise ConfigError(f"target: got {plain['target']!r}; accepted: settings, as conf/target has them")
    return load_node(plain["target"], device=own or plain.get("device"))


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What a target wrote: `texts` without special tokens, and how each came about, in the order of the prompts."""

    texts: tuple[str, ...]
    generations: tuple[Generation, ...]

    @property
    def accepted_length(self) -> float:
        """Tokens gained per target pass, bonus included, over the rounds in which a whole block would have fitted; NaN
        without one."""
        return accepted_length(one for generation in self.generations for one in generation.rounds)


def generate(
    target: "FrozenTarget",
    drafter: Drafter | None,
    prompts: Iterable[str | Messages],
    config: DecodeConfig | None = None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Generated:
    """Answer each prompt: a user's text, or messages that end before the answer, in the target's chat template with
    `template_kwargs` (such as `enable_thinking`). `config` says how many tokens, how they are drawn and how many
    prompts at a time (greedy, 256 and one by default).

    The text is the target's own, with any drafter, or none; the drafter is moved to the target's device. Raises
    ConfigError and DataError for settings and prompts that do not fit.
    """
    if isinstance(prompts, str | Mapping):
        raise DataError(f"prompts: got {type(prompts).__name__}; accepted: a list of texts, or of lists of messages")
    encoder = ChatEncoder(
        target.tokenizer, max_length=target.spec.max_position, template_kwargs=dict(template_kwargs or {})
    )
    encoded = [encoder.prompt(to_messages(one, where=f"prompt {number}")) for number, one in enumerate(prompts)]
    if drafter is not None:
        drafter = drafter.to(target.device).eval()
    rows = decode(target, drafter, encoded, config or DecodeConfig())
    return Generated(texts=tuple(encoder.answer(row.tokens) for row in rows), generations=tuple(rows))
