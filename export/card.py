# The model card of an export: the header that a hub reads, what was measured, how each engine is started with the
# folder, what it does a little otherwise, and where the weights come from.

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafters.decoding.render import Section, markdown
from drafters.weights import hub_id
from export import table
from export.families import family_of, vocabulary_of
from export.serving import TARGET
from export.source import Source

__all__ = ["CardFacts", "card_text"]

TAGS = ("speculative-decoding", "draft-model")
SHOWN = ("run", "step", "positions", "seed", "data_hash", "sha256")  # of the provenance


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """`to` and `quant` of the export; `commands` by engine, `notes` and `sections` go in as they are. `base_model`:
    where the target comes from, as its config says."""

    to: str
    quant: str
    base_model: str
    license: str | None = None
    sections: Sequence[Section] = ()
    commands: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def card_text(source: Source, facts: CardFacts) -> str:
    """README.md with its YAML header."""
    from huggingface_hub import ModelCard, ModelCardData

    family, vocabulary = family_of(source.node), vocabulary_of(source.node)
    base_model = hub_id(facts.base_model)
    data = ModelCardData(
        license=facts.license,
        base_model=base_model,
        base_model_relation="adapter" if base_model else None,
        library_name="gguf" if facts.to == "gguf" else "transformers" if facts.to == "mtp" else None,
        tags=[*TAGS, family, *([facts.quant] if facts.quant != "none" else [])],
    )
    parts = [f"# {source.node['name']}: a draft head for {source.spec.name}", _opening(source, facts)]
    parts += [markdown(section) for section in facts.sections]
    parts += [_serving(facts), _loading(facts.to, family, vocabulary), _notes(facts.notes), _provenance(source)]
    return str(
        ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(part.strip() for part in parts if part) + "\n")
    )


def _opening(source: Source, facts: CardFacts) -> str:
    family, vocabulary = family_of(source.node), vocabulary_of(source.node)
    size = f" of {source.node['draft_vocab_size']:,} tokens" if vocabulary == "reduced" else ""
    quant = "not quantized" if facts.quant == "none" else f"quantized to {facts.quant}"
    return (
        f"A drafter for speculative decoding, trained on `{facts.base_model}`, which it does not change: family "
        f"`{family}`, up to {source.node['block_size']} drafts a round, {vocabulary} vocabulary{size}, {quant}. The "
        "target verifies every draft, so a served text is the target's own."
    )


def _serving(facts: CardFacts) -> str:
    if not facts.commands:
        return ""
    blocks = [f"{engine}:\n\n```bash\n{command}\n```" for engine, command in facts.commands.items()]
    if any(TARGET in command.split() for command in facts.commands.values()):
        blocks.append(f"{TARGET} is the target in the Hugging Face layout: its hub id or its folder.")
    return "## How to serve it\n\n" + "\n\n".join(blocks)


def _loading(to: str, family: str, vocabulary: str) -> str:
    lines = [
        f"- {engine}: {'loads it' if one.loads else 'does not load it'}{f', {one.says}' if one.says else ''}"
        for engine, one in table.verdicts(to, family, vocabulary).items()
    ]
    return "## Engines\n\n" + "\n".join(lines)


def _notes(notes: Sequence[str]) -> str:
    return "## To know\n\n" + "\n".join(f"- {note}" for note in notes) if notes else ""


def _provenance(source: Source) -> str:
    facts: dict[str, Any] = {name: source.provenance[name] for name in SHOWN if source.provenance.get(name) is not None}
    facts["target"] = {"name": source.spec.name, "weights_hash": source.spec.weights_hash}
    facts["drafter"] = {name: value for name, value in source.node.items() if name not in ("loss", "target_config")}
    return "## Where it comes from\n\n```json\n" + json.dumps(facts, indent=1) + "\n```"
