# The folder with speculators' envelope: what vLLM demands of it, layers counted as indices into hidden states, the
# window as its trainer counts it; and a reader that knows the format alone drafts what our own session drafts.

from dataclasses import replace

import pytest
import torch

from drafters.errors import ConfigError
from export import to_speculators
from export.to_speculators import Options
from tests.contract_cases import Reading
from tests.published_doubles import BlockEngine, Eagle3Engine, drafter_of_family, saved_target, source_of, stored
from tests.test_export_hf import in_file

F32 = Options(dtype="f32")
SERVED = [(family, reduced) for family in ("parallel", "markov", "eagle3") for reduced in (False, True)]
PROMPT = torch.tensor([9, 40, 77, 5, 100, 61, 20])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(folder):
    return saved_target(folder)


def made(family, target, folder, *, reduced=False, **settings):
    return source_of(drafter_of_family(family, target, reduced=reduced, **settings), target_folder=folder)


def written(source, out, *, quant="none", options=F32):
    out.mkdir()
    to_speculators.write(source, quant, out, options=options)
    return out


@pytest.mark.parametrize("quant", ["none", "int8", "int4", "fp8"])
@pytest.mark.parametrize(("family", "reduced"), SERVED)
def test_the_file_holds_what_the_manifest_says(family, reduced, quant, target, folder, tmp_path):
    source = made(family, target, folder, reduced=reduced)
    out = written(source, tmp_path / "out", quant=quant, options=Options())
    assert in_file(out) == to_speculators.manifest(source, quant)
    assert ("quantization_config" in stored(out)[0]) == (quant != "none")
    prefix = "layers.0." if family == "eagle3" else "layers.1."
    assert [name for name in in_file(out) if name.startswith(f"{prefix}self_attn.q_proj")]


def test_what_vllm_demands_of_the_envelope(target, folder, tmp_path):
    options = Options(dtype="bf16", verifier="org/target")
    config, _ = stored(written(made("markov", target, folder), tmp_path / "out", options=options))
    assert "model_type" not in config
    assert config["speculators_model_type"] == "dspark"
    proposal = config["speculators_config"]
    assert proposal["proposal_methods"][0]["speculative_tokens"] == 4
    assert proposal["verifier"] == {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
    layers = config["transformer_layer_config"]
    assert (layers["model_type"], layers["num_hidden_layers"], layers["vocab_size"]) == ("qwen3", 2, 128)
    assert layers["dtype"] == layers["torch_dtype"] == config["dtype"] == "bfloat16"
    # 0-based outputs 0 and 2 are hidden_states 1 and 3; vLLM takes one off again.
    assert config["aux_hidden_state_layer_ids"] == [1, 3]
    assert config["sliding_window_non_causal"] is True


def test_the_targets_own_name_stands_where_none_is_given(target, folder, tmp_path):
    source = made("markov", target, None)
    source = replace(source, spec=replace(source.spec, name="tiny"))
    config, _ = stored(written(source, tmp_path / "out"))
    assert config["speculators_config"]["verifier"] == {"name_or_path": "tiny", "architectures": []}


@pytest.mark.parametrize(("first", "slots"), [(True, 4), (False, 5)])
def test_an_anchor_that_drafts_nothing_takes_a_slot_and_no_token(first, slots, target, folder, tmp_path):
    out = written(made("markov", target, folder, sample_from_anchor=first), tmp_path / "out")
    config, _ = stored(out)
    assert (config["block_size"], config["sample_from_anchor"]) == (slots, first)
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert to_speculators.read(out, spec=target.spec)[0]["block_size"] == 4


def test_what_eagle3_leaves_to_no_default(target, folder, tmp_path):
    for before in (False, True):
        source = made("eagle3", target, folder, reduced=True, norm_before_residual=before)
        config, _ = stored(written(source, tmp_path / f"out{before}"))
        assert config["norm_before_residual"] is before
        assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
        assert config["norm_before_fc"] is config["fc_norm"] is config["norm_output"] is False
        assert (config["draft_vocab_size"], config["target_hidden_size"]) == (64, 32)
        assert config["transformer_layer_config"]["model_type"] == "llama"


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_reader_of_the_format_drafts_what_our_session_drafts(reduced, first, window, target, folder, tmp_path):
    family = "markov" if first else "parallel"
    source = made(family, target, folder, reduced=reduced, window=window)
    engine = BlockEngine(written(source, tmp_path / "out"), target)
    reading = Reading(source.drafter, target, [PROMPT])
    anchor = int(reading.session.anchor_B[0])
    states = engine.slots(PROMPT, anchor, seen="trainer")
    torch.testing.assert_close(states[-4:], reading.session.hidden()[0], rtol=1e-4, atol=1e-5)
    ids, _, _ = engine.draft(PROMPT, anchor, seen="trainer")
    assert ids == reading.propose(4).tokens_BS[0].tolist()
    assert engine.layers["sliding_window"] == window
    if window is not None:
        assert engine.layers["layer_types"] == ["sliding_attention"] * 2
        assert engine.layers["is_causal"] is False
        assert engine.layers["use_sliding_window"] is True


@pytest.mark.parametrize("before", [False, True])
def test_a_reader_of_eagle3_drafts_what_our_session_drafts(before, target, folder, tmp_path):
    source = made("eagle3", target, folder, reduced=True, norm_before_residual=before)
    engine = Eagle3Engine(written(source, tmp_path / "out"), target, layer="layers.0")
    reading = Reading(source.drafter, target, [PROMPT])
    ids, _ = engine.draft(PROMPT, int(reading.session.anchor_B[0]), 4)
    assert ids == reading.propose(4).tokens_BS[0].tolist()


@pytest.mark.parametrize(("family", "reduced"), SERVED)
def test_reading_gives_the_settings_and_the_tensors_back(family, reduced, target, folder, tmp_path):
    settings = {} if family == "eagle3" else {"window": 9}
    source = made(family, target, folder, reduced=reduced, **settings)
    node, tensors = to_speculators.read(written(source, tmp_path / "out"), spec=target.spec)
    said = {key: list(value) if isinstance(value, tuple) else value for key, value in source.node.items()}
    assert {key: value for key, value in node.items() if key != "name"} == {k: said[k] for k in node if k != "name"}
    assert tensors.keys() == source.tensors.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in source.tensors.items())


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("gated", {}, r"vLLM, llama.cpp: it knows the plain Markov head only; SGLang: .*to=hf \(SGLang\)"),
        ("medusa", {}, r"this format has no Medusa.*to=hf \(vLLM\)"),
        ("parallel", {"sample_from_anchor": True}, "sample_from_anchor=true without a sequential head"),
        ("markov", {"window": 3}, r"drafter\.window=3 for a block of 4 slots.*accepted: 4 or more"),
    ],
)
def test_what_no_engine_serves_is_refused_with_what_to_do(family, settings, says, target, folder):
    with pytest.raises(ConfigError, match=says):
        to_speculators.refuse(made(family, target, folder, **settings), "none")


def test_scales_of_the_target(target, folder, tmp_path):
    source = made("parallel", target, folder)
    source = replace(source, spec=replace(source.spec, logit_scale=0.25))
    config, _ = stored(written(source, tmp_path / "out"))
    assert config["transformer_layer_config"]["logit_scale"] == 0.25
    with pytest.raises(ConfigError, match="scales its logits by"):
        to_speculators.refuse(replace(source, node={**source.node, **made("markov", target, folder).node}), "none")
