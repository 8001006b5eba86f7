# What a drafter is, to an engine: its family by its settings, and the size of its vocabulary. Formats decide by these
# two words what they can hold.

from collections.abc import Mapping
from typing import Any

__all__ = ["BLOCK", "FAMILIES", "SEQUENTIAL", "family_of", "vocabulary_of"]

BLOCK = "drafters.heads.block.BlockDrafter"
EAGLE3 = "drafters.heads.eagle3.Eagle3Drafter"
MEDUSA = "drafters.heads.medusa.MedusaDrafter"
# Sequential heads by family: a block drafter of such a head is of that family, one without of `parallel`.
SEQUENTIAL = {
    "markov": "drafters.heads.sequential.MarkovHead",
    "gated": "drafters.heads.sequential.GatedHead",
    "rnn": "drafters.heads.sequential.RNNHead",
}
_OTHERS = {
    EAGLE3: "eagle3",
    MEDUSA: "medusa",
    "drafters.heads.mtp.MtpDrafter": "mtp",
    "drafters.heads.exit.ExitDrafter": "exit",
    "drafters.heads.draft_model.DraftModel": "draft_model",
    "drafters.heads.ngram.NgramDrafter": "ngram",
}
FAMILIES = ("parallel", *SEQUENTIAL, *_OTHERS.values())


def family_of(node: Mapping[str, Any]) -> str:
    """One of FAMILIES by a drafter's settings (with `_target_`); "own" for classes of a user's own."""
    target = node["_target_"]
    if target != BLOCK:
        return _OTHERS.get(target, "own")
    head = node.get("sequential")
    if head is None:
        return "parallel"
    return next((family for family, path in SEQUENTIAL.items() if path == head["_target_"]), "own")


def vocabulary_of(node: Mapping[str, Any]) -> str:
    """ "reduced" where a drafter's logits are over some of the target's tokens, else "full"."""
    return "full" if node.get("draft_vocab_size") is None else "reduced"
