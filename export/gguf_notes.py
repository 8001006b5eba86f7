# What a user of a GGUF draft should know beyond that it loads: where llama.cpp drafts a little otherwise than training
# did, and what of the file acts with which option.

from collections.abc import Mapping
from typing import Any

from drafters.spec import TargetSpec
from export.gguf_layout import kind_of

__all__ = ["gguf_notes"]


def gguf_notes(node: Mapping[str, Any], spec: TargetSpec) -> list[str]:
    """Sentences about a draft of these settings."""
    kind = kind_of(node)
    said = [
        "TARGET.gguf is the target as GGUF (convert_hf_to_gguf.py of llama.cpp makes it). llama.cpp hands out the "
        "states that a draft reads for some architectures only; llama, qwen3, qwen3moe and gpt-oss are among them.",
    ]
    if kind == "eagle3":
        return said
    said.append(
        f"--spec-draft-n-max {node['block_size']} drafts the block that it was trained for; llama.cpp's default is 3, "
        "and a shorter block is another one, not the beginning of the same."
    )
    if node["confidence"]:
        said.append("--spec-draft-p-min P cuts a draft where its confidence head says less than P; 0 drafts all.")
    if node["sequential"] is None and kind == "dspark":
        said.append("It is written with a Markov head of zeros, since of a plain DFlash llama.cpp reads less.")
    if (window := node["window"]) is not None:
        said.append(
            f"Trained to see the {window} context positions before its anchor. llama.cpp moves the window along with "
            "the slot: the j-th after the anchor's sees j fewer of the oldest."
        )
    if spec.logit_softcap is not None:
        said.append(
            f"The target caps its logits at {spec.logit_softcap:g}; llama.cpp does not cap the draft's, which changes "
            "no draft, only what --spec-draft-p-min compares."
        )
    return said
