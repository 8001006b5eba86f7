# The GGUF draft: names, numbers and types; a reader that knows the format alone drafts what our own session drafts;
# what llama.cpp would draft otherwise is refused with what to do. The engine itself is asked in tests/engines.

import math
import re
import warnings
from dataclasses import replace

import pytest
import torch
from gguf import GGUFReader

from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import CheckpointError, ConfigError
from drafters.target import FrozenTarget
from export import to_gguf
from export.gguf_layout import Entry, layout
from export.gguf_types import TYPES, bound_of, float_reason, type_of
from export.to_gguf import Options
from tests.block_doubles import MARKOV, make_drafter
from tests.contract_cases import Reading
from tests.gguf_doubles import CASES, DflashDraft, Eagle3Draft, GgufDraft, write_tokenizer
from tests.published_doubles import drafter_of_family, saved_target, source_of
from tests.test_families import family_model

F32 = Options(type="F32")
PROMPT = torch.tensor([9, 40, 77, 5, 100, 61, 20])
MARKOV32 = {**MARKOV, "rank": 32}  # whole blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(folder):
    target = saved_target(folder, rope_parameters={"rope_theta": 5000.0, "rope_type": "default"})
    write_tokenizer(folder, target.spec.vocab_size)
    return target


def made(case, target, folder, *, reduced=True, **settings):
    settings = {**CASES[case], **settings}
    return source_of(
        drafter_of_family(case.partition("-")[0], target, reduced=reduced, **settings), target_folder=folder
    )


def markov32(target, folder):
    """A Markov drafter every row of which is of whole blocks."""
    return source_of(make_drafter(target, sequential=MARKOV32, window=None), target_folder=folder)


def written(source, out, *, quant="none", options=F32):
    out.mkdir()
    to_gguf.write(source, quant, out, options=options)
    (path,) = out.iterdir()
    return path


def in_file(path):
    """Shape, as we write it, and type of every tensor."""
    return {t.name: (tuple(reversed(t.shape.tolist())), t.tensor_type.name) for t in GGUFReader(path).tensors}


def keys(path):
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


@pytest.mark.parametrize("type_name", [None, "F32", "BF16", "Q5_1"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_file_holds_what_the_manifest_says(case, reduced, type_name, target, folder, tmp_path):
    source, options = made(case, target, folder, reduced=reduced), Options(type=type_name)
    path = written(source, tmp_path / "out", quant="int8", options=options)
    assert in_file(path) == to_gguf.manifest(source, "int8", options=options)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_what_is_read_is_what_was_written(case, reduced, target, folder, tmp_path):
    source = made(case, target, folder, reduced=reduced)
    node, tensors = to_gguf.read(written(source, tmp_path / "out").parent, spec=target.spec)
    assert node.items() <= {**source.node, "name": node["name"]}.items()
    assert tensors.keys() == source.tensors.keys()
    for name, tensor in source.tensors.items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("case", ["markov", "parallel", "eagle3"])
def test_a_drafter_made_of_what_is_read_loads(case, target, folder, tmp_path):
    source = made(case, target, folder)
    node, tensors = to_gguf.read(written(source, tmp_path / "out", quant="int8").parent, spec=target.spec)
    assert {"window", "layer_ids", "block_size", "draft_vocab_size"} & source.node.keys() <= node.keys()
    source.drafter.load_state_dict(tensors, strict=True)
    assert (
        load_drafter(save_drafter(source.drafter, tmp_path / "again", spec=target.spec)).config == source.drafter.config
    )


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("eagle3")])
def test_a_reader_of_the_format_drafts_what_our_session_drafts(case, reduced, target, folder, tmp_path):
    source = made(case, target, folder, reduced=reduced)
    reading = Reading(source.drafter, target, [PROMPT])
    expected = reading.propose(source.drafter.block_size)
    draft = DflashDraft(written(source, tmp_path / "out"), target)
    ids, confidences = draft.draft(PROMPT, int(reading.session.anchor_B[0]))
    assert ids == expected.tokens_BS[0].tolist()
    assert (confidences is not None) == source.node["confidence"]
    if confidences is not None:
        torch.testing.assert_close(confidences, expected.confidence_BS[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("case", ["eagle3", "eagle3-normed"])
def test_a_reader_of_eagle3_drafts_what_our_session_drafts(case, reduced, target, folder, tmp_path):
    source = made(case, target, folder, reduced=reduced)
    reading = Reading(source.drafter, target, [PROMPT])
    expected = reading.propose(4).tokens_BS[0].tolist()
    draft = Eagle3Draft(written(source, tmp_path / "out"), target)
    assert draft.draft(PROMPT, int(reading.session.anchor_B[0]), 4) == expected


@pytest.mark.parametrize("family", ["granite", "gemma2"])
@pytest.mark.parametrize("case", ["parallel", "markov", "eagle3"])
def test_scales_of_a_target_are_in_the_file(case, family, tmp_path):
    model, place = family_model(family), tmp_path / "target"
    model.save_pretrained(place)
    target = FrozenTarget.from_model(model, mask_token_id=3)
    write_tokenizer(place, target.spec.vocab_size)
    source = made(case, target, place, reduced=False)
    if (case, family) == ("markov", "gemma2"):
        with pytest.raises(ConfigError, match="caps its logits at 3"):
            to_gguf.refuse(source, "none")
        return
    reading = Reading(source.drafter, target, [PROMPT])
    anchor, expected = int(reading.session.anchor_B[0]), reading.propose(4).tokens_BS[0].tolist()
    path = written(source, tmp_path / "out")
    if case == "eagle3":
        assert Eagle3Draft(path, target).draft(PROMPT, anchor, 4) == expected
    else:
        assert keys(path)["dflash.embedding_scale"] == pytest.approx(target.spec.embed_scale)
        assert DflashDraft(path, target).draft(PROMPT, anchor)[0] == expected
    read = to_gguf.read(path.parent, spec=target.spec)[1]
    assert all(torch.equal(read[name], tensor) for name, tensor in source.tensors.items())


def test_scaled_rotary_frequencies_are_factors_in_the_file(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**scaling, "original_max_position_embeddings": 32, "rope_theta": 5000.0}
    target = saved_target(tmp_path, rope_parameters=rope)
    write_tokenizer(tmp_path, target.spec.vocab_size)
    for case, reader in (("markov", DflashDraft), ("eagle3", Eagle3Draft)):
        source = made(case, target, tmp_path)
        path = written(source, tmp_path / case)
        plain = 5000.0 ** -(torch.arange(0, 8, 2) / 8)
        inverse = torch.tensor(target.spec.rope_inv_freq)
        draft = reader(path, target)
        torch.testing.assert_close(draft.angles(torch.tensor([3.0])), 3 * inverse[None])
        assert not torch.allclose(plain, inverse), "nothing is scaled here"


def test_numbers_are_counted_as_llama_cpp_does(target, folder, tmp_path):
    said = keys(written(made("markov", target, folder, window=9), tmp_path / "markov"))
    assert said["general.architecture"] == "dflash"
    assert said["dflash.target_layers"] == [1, 3]  # the inputs of the layers after ours, 0 and 2
    assert (said["dflash.block_size"], said["dflash.sample_from_anchor"]) == (4, True)
    assert said["dflash.attention.sliding_window"] == 10  # the position that looks is one of them
    assert said["dflash.attention.sliding_window_pattern"] == [True, True]
    assert said["dflash.rope.freq_base"] == 5000.0
    assert said["dflash.embedding_scale"] == 1.0
    assert said["dflash.attention.causal"] is False
    assert said["tokenizer.ggml.mask_token_id"] == target.spec.mask_token_id == 3
    said = keys(written(made("parallel", target, folder), tmp_path / "parallel"))
    assert (said["dflash.block_size"], said["dflash.sample_from_anchor"]) == (5, False)  # the anchor's slot as well
    assert "dflash.attention.sliding_window" not in said
    said = keys(written(made("eagle3-normed", target, folder), tmp_path / "eagle3"))
    assert said["eagle3.target_layers"] == [1, 2, 3]
    assert said["eagle3.target_hidden_size"] == 32
    assert (said["eagle3.norm_before_residual"], said["eagle3.norm_before_fc"]) == (True, False)


def test_the_anchor_sees_the_window_that_it_was_trained_with(target, folder, tmp_path):
    prompt = torch.arange(30) * 3 % 120 + 4
    source = made("markov", target, folder, window=6, num_layers=1)
    reading = Reading(source.drafter, target, [prompt])
    draft = DflashDraft(written(source, tmp_path / "out"), target)
    anchor = int(reading.session.anchor_B[0])
    ours, theirs = reading.session.hidden()[0], draft.block(prompt, anchor)
    torch.testing.assert_close(theirs[0], ours[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(theirs[3], ours[3], rtol=1e-3), "later slots see less in llama.cpp"
    draft.keys["attention.sliding_window"] += 1
    assert not torch.allclose(draft.block(prompt, anchor)[0], ours[0], rtol=1e-3)


def test_the_draft_vocabulary_is_absolute_ids(target, folder, tmp_path):
    source = made("markov", target, folder)
    draft = GgufDraft(written(source, tmp_path / "out"), target)
    assert draft.tensors["d2t"].dtype == torch.int64
    assert draft.tensors["d2t"].tolist() == list(range(0, 128, 2))
    rows = target.model.get_output_embeddings().weight[::2]
    assert torch.equal(draft.tensors["output.weight"], rows)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("case", ["markov", "eagle3"])
def test_weights_move_by_no_more_than_their_type_allows(case, type_name, target, folder, tmp_path):
    options = Options(type=type_name)
    source = markov32(target, folder) if case == "markov" else made(case, target, folder)
    read = to_gguf.read(written(source, tmp_path / "out", options=options).parent, spec=target.spec)[1]
    bounds = to_gguf.bounds(source, "none", options=options)
    assert bounds.keys() == source.tensors.keys()
    moved = 0.0
    for name, tensor in source.tensors.items():
        error = (read[name] - tensor).abs()
        assert bool((error <= bounds[name]).all()), name
        if bounds[name].max() > 0:
            moved = max(moved, float((error / bounds[name]).max()))
    assert type_name == "F32" or moved > 0.5, "the bound is no bound"


@pytest.mark.parametrize("type_name", [name for name, number in TYPES.items() if number.levels is not None])
def test_the_bound_of_blocks_holds_where_weights_are_lopsided(type_name):
    from gguf import GGMLQuantizationType, quants

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=generator) * torch.logspace(-5, 2, 64)[:, None]
    weight[::2] = weight[::2].abs()
    weight[::3] *= -1
    kind = GGMLQuantizationType[type_name]
    back = torch.tensor(quants.dequantize(quants.quantize(weight.numpy(), kind), kind))
    share = (back - weight).abs() / bound_of(weight, type_name)
    assert 0.5 < share.max() <= 1.0


def test_what_stays_float_and_why(target, folder):
    source = markov32(target, folder)
    types = {name: kind for name, (_, kind) in to_gguf.manifest(source, "int8").items()}
    assert types["d2t"] == "I64"
    kept = {name for name, kind in types.items() if kind == "F32"}
    assert kept == {name for name in types if "norm" in name or "conf_proj" in name}
    for name, entry in layout(source.node, source.spec).items():
        assert (float_reason(entry, "Q8_0") is None) == (types[name] == "Q8_0"), name


def test_rows_that_are_no_whole_blocks_are_half_floats():
    assert type_of(Entry((10, 40), "projection"), "Q8_0") == "F16"
    assert type_of(Entry((10, 64), "projection"), "Q8_0") == "Q8_0"
    assert "40" in float_reason(Entry((10, 40), "projection"), "Q8_0")


def test_a_type_is_chosen_by_quant_and_an_explicit_one_wins(target, folder, tmp_path):
    source = made("eagle3", target, folder)
    for quant, expected in (("none", "F16"), ("int8", "Q8_0"), ("int4", "Q4_0")):
        path = written(source, tmp_path / quant, quant=quant, options=Options())
        assert in_file(path)["blk.0.attn_q.weight"][1] == expected
        assert keys(path)["general.file_type"] == TYPES[expected].file_type
    path = written(source, tmp_path / "explicit", quant="int4", options=Options(type="Q5_0"))
    assert in_file(path)["blk.0.attn_q.weight"][1] == "Q5_0"


def test_the_name_says_what_llama_cpp_calls_it(target, folder, tmp_path):
    for case, kind in (
        ("markov", "dspark"),
        ("parallel", "dflash"),
        ("parallel-anchor", "dspark"),
        ("eagle3", "eagle3"),
    ):
        source = made(case, target, folder)
        assert written(source, tmp_path / case).name == f"{kind}-{source.node['name']}.gguf"


@pytest.mark.parametrize(
    ("case", "settings", "says"),
    [
        ("markov", {"window": 2}, "drafter.window=2 for a block of 4 slots"),
        ("markov", {"layer_ids": (0, 3)}, "none of the last layer, 3"),
        ("eagle3", {"layer_ids": (0, 1)}, "exactly 3 layers"),
    ],
)
def test_what_llama_cpp_would_draft_otherwise_is_refused(case, settings, says, target, folder):
    source = made(case, target, folder, **settings)
    with pytest.raises(ConfigError, match=re.escape(says)):
        to_gguf.refuse(source, "none")


@pytest.mark.parametrize("family", ["gated", "rnn", "medusa"])
def test_families_without_tensors_in_llama_cpp_are_refused(family, target, folder):
    source = source_of(drafter_of_family(family, target, reduced=False), target_folder=folder)
    with pytest.raises(ConfigError, match=r"to=gguf: got a drafter of the family .* accepted for it: to="):
        to_gguf.refuse(source, "none")


def test_a_quant_that_gguf_has_not_is_refused(target, folder):
    source = made("markov", target, folder)
    with pytest.raises(ConfigError, match=r"got 'fp8'.*accepted for to=gguf: none, int8, int4.*to=hf"):
        to_gguf.refuse(source, "fp8")
    with pytest.raises(ConfigError, match="got 'int3'"):
        to_gguf.refuse(source, "int3")
    with pytest.raises(ValueError, match="got 'Q4_K'; accepted: F32"):
        Options(type="Q4_K")


def test_without_the_targets_folder_there_are_no_rows_and_no_tokenizer(target, tmp_path):
    for reduced, says in ((True, "rows of its embedding or output"), (False, "to.target_gguf: null")):
        with pytest.raises(ConfigError, match=says):
            to_gguf.write(made("markov", target, None, reduced=reduced), "none", tmp_path, options=F32)


def test_weights_that_are_no_numbers_or_too_large_are_refused(target, folder, tmp_path):
    source = made("markov", target, folder)
    weight = source.drafter.fc.weight
    with torch.no_grad():
        weight[0, 0] = 1e5
    with pytest.raises(ConfigError, match=r"fc.weight: weights as large as 1e\+05 do not fit F16.*BF16"):
        written(source, tmp_path / "large", options=Options())
    assert in_file(written(source, tmp_path / "wide", options=Options(type="BF16")))["fc.weight"][1] == "BF16"
    with torch.no_grad():
        weight[0, 0] = math.nan
    with pytest.raises(CheckpointError, match=r"fc.weight: holds NaN"):
        written(source, tmp_path / "nan", options=F32)


def test_files_that_are_damaged_or_anothers_are_refused(target, folder, tmp_path):
    path = written(made("markov", target, folder), tmp_path / "out")
    with pytest.raises(CheckpointError, match="not those of its settings"):
        to_gguf.read(path.parent, spec=replace(target.spec, intermediate_size=80))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        to_gguf.read(path.parent, spec=target.spec)
    path.write_bytes(whole.replace(b"dflash.block_size", b"dflash.block_sizf"))
    with pytest.raises(CheckpointError, match="says no 'block_size'"):
        to_gguf.read(path.parent, spec=target.spec)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"holds 0 \.gguf files"):
        to_gguf.read(path.parent, spec=target.spec)


def test_no_warning_is_left_behind(target, folder, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written(made("markov", target, folder), tmp_path / "out", quant="int4", options=Options())
