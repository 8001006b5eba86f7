# Runs in vLLM's own environment, which knows nothing of this package: does the job of the JSON file that it is given
# and writes what it found to a second one. `load`: builds a draft of each folder as vLLM does and says what came of it.
# `serve`: continues prompts greedily, one after the other, and keeps vLLM's own counts of each.

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
COUNTS = {"num_drafts": "rounds", "num_draft_tokens": "drafted", "num_accepted_tokens": "accepted"}


def load(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By folder: `class`, `scheme` of the joined q/k/v, `window`, `layers` that it asks the target for; or `error`."""
    import torch
    from vllm.config.vllm import VllmConfig
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    # A processor without accelerators has nothing to empty, and the runner that is not used here nothing to check.
    torch.accelerator.empty_cache = lambda: None
    VllmConfig._validate_v1_model_runner = lambda self: None
    init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
    ready, found = False, {}
    for folder, method in job["drafts"].items():
        config = config_of(job, folder, method)
        if not ready:
            from vllm.config import set_current_vllm_config

            with set_current_vllm_config(config):
                initialize_model_parallel(1, 1)
            ready = True
        try:
            found[folder] = facts_of(config)
        except Exception as error:  # every engine's own: they are what the job asks for
            found[folder] = {"error": f"{type(error).__name__}: {error}"}
    return found


def config_of(job, folder, method):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=job["target"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        dtype=job["dtype"],
        speculative_config={"model": folder, "method": method, "num_speculative_tokens": job["length"]},
    ).create_engine_config()


def facts_of(config):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.models.utils import get_draft_quant_config
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    with set_current_vllm_config(config):
        config.quant_config = get_draft_quant_config(config)
        model = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
    facts = {
        "class": type(model).__name__,
        "layers": get_eagle3_aux_layers_from_config(config.speculative_config),
    }
    if layers := getattr(getattr(model, "model", None), "layers", None):
        attention = layers[0].self_attn
        facts["scheme"] = type(attention.qkv_proj.quant_method).__name__
        facts["window"] = getattr(attention, "sliding_window", None)
    return facts


def serve(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each prompt: new token ids, rounds, drafts made and drafts accepted."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=job["context"],
        max_num_seqs=1,
        dtype=job["dtype"],
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={"model": job["draft"], "method": job["method"], "num_speculative_tokens": job["length"]},
    )
    wanted = SamplingParams(
        temperature=0,
        max_tokens=job["tokens"],
        ignore_eos=job["ignore_stops"],
        stop_token_ids=job["stops"],
        detokenize=False,
    )
    answers, before = [], counts(llm)
    for prompt in job["prompts"]:
        (answer,) = llm.generate({"prompt_token_ids": prompt}, wanted, use_tqdm=False)
        after = counts(llm)
        answers.append(
            {"tokens": list(answer.outputs[0].token_ids), **{name: after[name] - before[name] for name in after}}
        )
        before = after
    return answers


def counts(llm) -> dict[str, int]:
    found = dict.fromkeys(COUNTS.values(), 0)
    for metric in llm.get_metrics():
        name = COUNTS.get(metric.name.removeprefix("vllm:spec_decode_"))
        if name is not None:
            found[name] = int(metric.value)
    return found


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({"load": load, "serve": serve}[asked["what"]](asked)))
