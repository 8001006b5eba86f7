# How engines are started with a stitched folder, and what each of them runs otherwise than training did. They agree on
# the state after the final norm, the target's and the module's own, as what the module reads; nearly.

import json

from export.mtp_plan import Plan
from export.mtp_quant import is_quantized

__all__ = ["commands", "notes"]

# Families that transformers itself drafts for, and that llama.cpp's converter takes the module of.
TRANSFORMERS = ("deepseek_v3", "glm4_moe")
LLAMA_CPP = ("glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def commands(plan: Plan, *, folder: str) -> dict[str, str]:
    """By engine, how to serve `folder`."""
    if plan.options.mtp_quant == "absent":
        return {"vLLM": f"vllm serve {folder}", "SGLang": f"python -m sglang.launch_server --model-path {folder}"}
    drafts = plan.node["block_size"]
    settings = json.dumps({"method": "mtp", "num_speculative_tokens": drafts})
    # SGLang counts the token before the drafts too.
    steps = f"--speculative-num-steps {drafts} --speculative-eagle-topk 1 --speculative-num-draft-tokens {drafts + 1}"
    made = {
        "vLLM": f"vllm serve {folder} --speculative-config '{settings}'",
        "SGLang": f"python -m sglang.launch_server --model-path {folder} --speculative-algorithm NEXTN {steps}",
    }
    if plan.model_type in LLAMA_CPP:
        made["llama.cpp"] = (
            f"python convert_hf_to_gguf.py {folder} --outfile TARGET.gguf && llama-server -m TARGET.gguf "
            f"--spec-type draft-mtp --spec-draft-n-max {drafts}"
        )
    return made


def notes(plan: Plan) -> list[str]:
    """What to know before the folder is served."""
    if plan.options.mtp_quant == "absent":
        return ["This copy of the target has no module for multi-token prediction, and its config says so."]
    drafts, kind, told = plan.node["block_size"], plan.spelling.name, []
    if drafts > 1:
        told.append(
            "Every depth was trained on a sequence of its own. Engines run the module again on the keys and values of "
            "its first depth, and accept the drafts after the first less often than measured here."
        )
    if plan.model_type == "glm4_moe" and drafts > 1:
        told.append("vLLM feeds back the state before the final norm in this family: ask it for 1 draft token.")
    if kind == "mimo":
        told.append(
            "SGLang gives the module the target's state after its final norm, as trained; vLLM gives the one before, "
            "and accepts less."
        )
    if kind != "qwen":
        told.append("vLLM takes zeros for the embedding in the first row of a text; training does not.")
    if plan.model_type in LLAMA_CPP:
        told.append("llama.cpp puts a row before the first one, of the first token and a state of zeros.")
    if plan.model_type in TRANSFORMERS and drafts == 1:
        told.append("transformers runs it as trained: generate(..., use_mtp=True), from 5.24 on.")
    if kind == "mimo" and plan.options.mtp_quant == "float" and is_quantized(plan.target, plan.config):
        told.append("vLLM takes the block for quantized as the target's first layer is: it needs mtp_quant=quantized.")
    return told
