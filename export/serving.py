# How an engine is started with a folder, and what of a drafter it does a little otherwise: sentences for the folder's
# own README and for the screen.

import json
from collections.abc import Mapping
from typing import Any

from drafters.spec import TargetSpec
from drafters.weights import hub_id
from export import table
from export.families import SEQUENTIAL, family_of, vocabulary_of

__all__ = ["TARGET", "commands", "notes"]

TARGET = "TARGET"  # in commands, where the target has no name that an engine could take
METHODS = {"parallel": "dflash", "markov": "dspark", "gated": "dspark", "rnn": "dspark", "eagle3": "eagle3"}


def commands(node: Mapping[str, Any], to: str, *, target: str, folder: str) -> dict[str, str]:
    """For each engine that loads a `to=hf` or `to=speculators` folder of such a drafter, the command that serves it;
    `target` and `folder` are where the two lie. Engines fetch no wheel, and read no GGUF as what a draft is for."""
    target = TARGET if target.startswith("pypi:") or target.endswith(".gguf") else hub_id(target) or target
    family, drafts = family_of(node), node["block_size"]
    method = METHODS.get(family, family)
    settings = {"method": method, "model": folder, "num_speculative_tokens": drafts}
    # SGLang counts the token before the drafts too.
    sglang = f"--speculative-algorithm {method.upper()} --speculative-draft-model-path {folder}"
    if method == "eagle3":
        sglang += f" --speculative-num-steps {drafts} --speculative-eagle-topk 1"
    sglang += f" --speculative-num-draft-tokens {drafts + 1}"
    made = {
        "vLLM": f"vllm serve {target} --speculative-config '{json.dumps(settings)}'",
        "SGLang": f"python -m sglang.launch_server --model-path {target} {sglang}",
        "llama.cpp": f"python convert_hf_to_gguf.py {folder} --target-model-dir {target}",
    }
    loading = table.verdicts(to, family, vocabulary_of(node))
    return {engine: command for engine, command in made.items() if loading[engine].loads}


def notes(node: Mapping[str, Any], spec: TargetSpec, to: str) -> list[str]:
    """What a user of the folder should know beyond that it loads."""
    family, vocabulary = family_of(node), vocabulary_of(node)
    said = []
    for engine, verdict in table.verdicts(to, family, vocabulary).items():
        if not verdict.loads or verdict.says:
            said.append(f"{engine}: {'' if verdict.loads else 'does not load it, '}{verdict.says}.")
    if spec.num_layers - 1 in node.get("layer_ids", ()):
        said.append("It reads the output of the target's last layer, which SGLang and llama.cpp do not hand out.")
    if (window := node.get("window")) is not None:
        said.append(
            f"Trained to see the {window} context positions before its anchor. Engines move the window along with the "
            "slot, so that a later slot sees fewer of the oldest; TensorRT-LLM ignores it, and drafts less well for it."
        )
    if "SGLang" in commands(node, to, target="", folder="") and family in SEQUENTIAL and not node["confidence"]:
        said.append(
            "It has no confidence head, which SGLang asks for in every mode but SGLANG_RAGGED_VERIFY_MODE=static, its "
            "default."
        )
    if family == "parallel" and node["confidence"]:
        said.append("Its confidence head is left out: DFlash has none.")
    if spec.logit_softcap is not None and family == "parallel":
        said.append(
            f"The target caps its logits at {spec.logit_softcap:g}. vLLM does not cap the draft's: at temperature 0 "
            "nothing changes, above it drafts are drawn a little too surely."
        )
    if spec.embed_scale != 1.0 and family != "medusa":
        said.append(
            f"The target scales its embedding by {spec.embed_scale:g}; the folder brings the scaled rows along. SGLang "
            "takes the target's rows instead, and drafts worse where it does not scale them."
        )
    return said
