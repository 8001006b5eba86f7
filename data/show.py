# Door: prints conversations as the drafter will train on them, with the supervised tokens highlighted.
#
#     python -m data.show source=jsonl source.path=FILE n=2
#     python -m data.show tokenizer=FOLDER            # another tokenizer than the target's

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig

from data.command import begin, check_settings

if TYPE_CHECKING:
    from rich.text import Text

    from drafters.types import Example

CONF = str(Path(__file__).resolve().parents[1] / "conf")


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """The settings of this door beside the source and the target."""

    n: int = 2
    tokenizer: str | None = None
    max_length: int = 2048
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n: got {self.n}; accepted: a whole number from 1")


def show(cfg: DictConfig) -> None:
    """Print `n` conversations of the source and what is supervised in them. Raises DataError when nothing is."""
    from itertools import islice

    from rich.console import Console
    from rich.rule import Rule
    from rich.text import Text

    from data.sources import load_conversations
    from drafters.chat import ChatEncoder, EncodeError
    from drafters.config import build_config, to_plain, typed

    plain = to_plain(cfg)
    config = typed(ShowConfig, {f.name: plain[f.name] for f in fields(ShowConfig)}, key="")
    _, source = build_config(cfg.source, key="source")
    tokenizer = _tokenizer(config.tokenizer, plain["target"])
    encoder = ChatEncoder(tokenizer, max_length=config.max_length, template_kwargs=config.template_kwargs)
    console = Console(highlight=False)
    failures, num_shown = [], 0
    for conversation in islice(load_conversations(source), config.n):
        console.print(Rule(Text(f"{conversation.id} ({conversation.source})")))
        try:
            example = encoder.encode(conversation)
        except EncodeError as error:
            failures.append(error)
            console.print(f"not used: {error}", style="yellow", markup=False, soft_wrap=True)
            continue
        console.print(highlighted(example, tokenizer, marks=not console.is_terminal), soft_wrap=True)
        cut = f", cut off at {config.max_length} tokens" if example.truncated else ""
        supervised = f"{int(example.loss_mask_T.sum()):,} of {len(example.tokens_T):,} tokens supervised{cut}"
        console.print(supervised, style="dim")
        num_shown += 1
    if not num_shown:
        raise failures[0]


def _tokenizer(name: str | None, target: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    from drafters.errors import ConfigError
    from drafters.weights import load_tokenizer

    if name is None:
        trust = bool(target.get("trust_remote_code"))
        return load_tokenizer(target["weights"], sha256=target["sha256"], trust_remote_code=trust)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"tokenizer: no folder '{name}'; give one that holds a tokenizer.json, or null")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer: none in '{name}': {str(error).splitlines()[0]}") from error


def highlighted(example: "Example", tokenizer: Any, *, marks: bool) -> "Text":
    """Rich text of an example; with `marks`, supervised runs also stand between ⟦ and ⟧ (for pipes and files)."""
    from itertools import groupby

    from rich.text import Text

    text = Text()
    pairs = zip(example.tokens_T.tolist(), example.loss_mask_T.tolist(), strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        piece = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        if supervised:
            text.append(f"⟦{piece}⟧" if marks else piece, style="bold black on green")
        else:
            text.append(piece, style="dim")
    return text


@hydra.main(version_base="1.3", config_path=CONF, config_name="show")
def main(cfg: DictConfig) -> None:
    from drafters.door import door

    with door():
        check_settings(cfg, "show")
        show(cfg)


if __name__ == "__main__":
    begin(main)
