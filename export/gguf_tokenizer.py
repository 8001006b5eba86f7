# The target's tokenizer for a GGUF draft. llama.cpp takes the size of the vocabulary and the mask token from it, but
# never tokenizes with it: text is the target's business. So the target's own GGUF is the best source (its fields are
# copied as they are), and tokenizer.json serves for byte-level BPE, the kind of Llama 3, Qwen, SmolLM and GPT.

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.errors import CheckpointError, ConfigError
from drafters.plain_json import parse
from drafters.spec import TargetSpec

__all__ = ["Field", "tokenizer_fields"]

PREFIX, MASK = "tokenizer.ggml.", "tokenizer.ggml.mask_token_id"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # types of tokens
_SPACE = "\u0120"  # what a space is in byte-level BPE
# How text is cut before merges, by what the regular expression of a tokenizer.json begins with.
_LLAMA = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
_QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"


@dataclass(frozen=True)
class Field:
    """A key of a GGUF file and its value: a bool, int, float, text, or a list of one of these."""

    key: str
    value: Any


def tokenizer_fields(folder: Path | None, spec: TargetSpec, *, target_gguf: Path | None = None) -> list[Field]:
    """The fields of the target's tokenizer, with the drafter's mask token.

    From `target_gguf` where given, else from tokenizer.json in the target's `folder`. Raises ConfigError when neither
    is at hand or the tokenizer is not byte-level BPE, CheckpointError for files that are damaged or another target's.
    """
    if target_gguf is not None:
        fields = list(_copied(target_gguf, spec))
    elif folder is not None and (folder / "tokenizer.json").is_file():
        fields = list(_made(folder / "tokenizer.json", spec))
    else:
        raise ConfigError(
            "to.target_gguf: null, and the target's folder has no tokenizer.json; a draft needs the target's "
            "tokenizer: give the target's own GGUF file, or a folder with tokenizer.json"
        )
    return [*(field for field in fields if field.key != MASK), Field(MASK, spec.mask_token_id)]


def _copied(path: Path, spec: TargetSpec) -> Iterator[Field]:
    from export.gguf_file import open_gguf

    reader = open_gguf(path, key="to.target_gguf")
    found = {name: field.contents() for name, field in reader.fields.items() if name.startswith(PREFIX)}
    size = len(found.get(f"{PREFIX}tokens", ()))
    if size != spec.vocab_size:
        raise CheckpointError(
            f"to.target_gguf: {path} has {size} tokens, the drafter's target {spec.vocab_size}; give the GGUF of the "
            "target that the drafter was trained for"
        )
    for name, value in found.items():
        yield Field(name, value)


def _made(path: Path, spec: TargetSpec) -> Iterator[Field]:
    try:
        parsed = parse(path.read_text())
        model, added, cuts = parsed["model"], parsed.get("added_tokens") or [], json.dumps(parsed["pre_tokenizer"])
        if model["type"] != "BPE" or model.get("byte_fallback") or "ByteLevel" not in cuts:
            raise ConfigError(
                f"{path}: is no byte-level BPE, and other kinds cannot be written from it; give the target's own GGUF "
                "file as to.target_gguf"
            )
        vocab = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is no tokenizer.json: {error}; copy the target's folder again") from error
    ids = {index: token for token, index in vocab.items()}
    if max(ids) >= spec.vocab_size:
        raise CheckpointError(
            f"{path}: has the id {max(ids)}, the drafter's target {spec.vocab_size} tokens; give the folder of the "
            "target that the drafter was trained for"
        )
    kinds = {token["id"]: _CONTROL if token["special"] else _USER_DEFINED for token in added}
    span = range(spec.vocab_size)
    yield Field(f"{PREFIX}model", "gpt2")
    yield Field(f"{PREFIX}pre", _pre_tokenizer(parsed["pre_tokenizer"]))
    yield Field(f"{PREFIX}tokens", [ids.get(i, f"[PAD{i}]") for i in span])
    yield Field(f"{PREFIX}token_type", [kinds.get(i, _NORMAL) if i in ids else _UNUSED for i in span])
    yield Field(f"{PREFIX}merges", [_merge(pair) for pair in model["merges"]])
    if spec.bos_id is not None:
        yield Field(f"{PREFIX}bos_token_id", spec.bos_id)
    if spec.eos_ids:
        yield Field(f"{PREFIX}eos_token_id", spec.eos_ids[0])


def _merge(pair: str | list[str]) -> str:
    """Two symbols with a space between; a space within one is written as byte-level BPE writes it."""
    return pair if isinstance(pair, str) else " ".join(part.replace(" ", _SPACE) for part in pair)


def _pre_tokenizer(parsed: Mapping[str, Any]) -> str:
    """llama.cpp's name of a pre-tokenizer, "default" for one that it would have to be told of by its own converter."""
    steps = parsed.get("pretokenizers", [parsed])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    patterns = [step["pattern"].get("Regex", "") for step in steps if step["type"] == "Split"]
    for begins, name in ((_LLAMA, "llama-bpe"), (_QWEN, "qwen2")):
        if len(patterns) == 1 and patterns[0].startswith(begins):
            return name
    return "default"
