# The settings of evaluate.py: those that make the prompts and the sampling act as they say, those of task=show, and
# wrong ones, which are named before anything is decoded.

import shutil
import warnings
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from drafters.decoding.sampling import effective_sampling
from drafters.errors import CheckpointError, ConfigError, DataError
from drafters.types import Sampling
from tests.evaluating import OTHER, evaluated, on, prompts_of
from tests.tiny_chat import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


def test_system_prompts_and_turns_are_those_asked_for(world, measured):
    source = ("source=jsonl", f"source.path={world}/pairs.jsonl")
    decode = tiny_tokenizer("chatml").decode
    plain, own, none, first = (measured(*source, *more) for more in ((), ("system=Hi.",), ("system=''",), ("turns=1",)))
    assert [one.num_turns for one in plain.dialogues] == [2, 2]
    assert [one.num_turns for one in first.dialogues] == [1, 1]
    assert first.place.facts["prompts"]["turns"] == 1
    assert own.place.facts["prompts"]["system"] == "Hi."
    assert "turns" not in plain.place.facts["prompts"]
    assert "<|im_start|>system\nHi.<|im_end|>" in decode(prompts_of(own)[0])
    # This template writes a system prompt of its own where there is none.
    assert "Be kind." in decode(prompts_of(plain)[0])
    assert prompts_of(none) == prompts_of(plain)
    answer = tiny_tokenizer("chatml")("Blue.").input_ids
    assert "assistant\nBlue.<|im_end|>\n<|im_start|>user\nAnd then?" in decode(plain.dialogues[0].encode([answer]))


def test_thinking_is_for_templates_that_know_it(world, measured, tmp_path):
    source = ("source=jsonl", f"source.path={world}/maths.jsonl")
    with pytest.raises(ConfigError, match=r"^thinking: got False, but the target's chat template ignores"):
        measured(*source, "thinking=false")
    shutil.copytree(world / "target", tmp_path / "thinks")
    tiny_tokenizer("qwen3").save_pretrained(tmp_path / "thinks")
    target = (*OTHER, f"target.weights={tmp_path}/thinks")
    found = {one: measured(*source, *target, one, names=("run=ngram",)) for one in ("thinking=true", "thinking=false")}
    texts = {one: tiny_tokenizer("qwen3").decode(prompts_of(this)[0]) for one, this in found.items()}
    assert texts["thinking=false"] == texts["thinking=true"] + "<think>\n\n</think>\n\n"
    assert len({this.place.out for this in found.values()}) == 2


@pytest.fixture
def sampler(world, tmp_path):
    """A target that asks to be sampled from."""
    shutil.copytree(world / "target", tmp_path / "sampler")
    own = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, eos_token_id=2)
    own.save_pretrained(tmp_path / "sampler")
    return (*OTHER, f"target.weights={tmp_path}/sampler", "source=jsonl", f"source.path={world}/maths.jsonl")


@pytest.mark.parametrize(
    ("asked", "acts"),
    [
        ([], Sampling(repetition_penalty=1.1)),
        (["temperature=null"], Sampling(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)),
        (["temperature=null", "top_k=0"], Sampling(temperature=0.6, top_p=0.9, repetition_penalty=1.1)),
        (["temperature=1"], Sampling(temperature=1, repetition_penalty=1.1)),
        (["temperature=1", "min_p=0.1", "repetition_penalty=1"], Sampling(temperature=1, min_p=0.1)),
    ],
    ids=str,
)
def test_the_sampling_that_acts_is_the_one_that_is_stored(sampler, measured, asked, acts):
    assert measured(*sampler, *asked, names=("run=ngram",)).config.sampling == acts


def test_settings_that_greedy_decoding_ignores_are_said(world, measured):
    source = ("source=jsonl", f"source.path={world}/maths.jsonl")
    with pytest.warns(UserWarning, match=r"^top_k=5 is ignored: temperature 0 is greedy decoding"):
        assert measured(*source, "top_k=5").config.sampling == Sampling()
    # What a target that does not sample says of top-k is no setting of the user's: nothing to warn of.
    greedy = SimpleNamespace(do_sample=False, temperature=0.7, top_k=50, top_p=0.9, repetition_penalty=None)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert effective_sampling(greedy, dict.fromkeys(names)) == Sampling()


def test_show_prints_a_text_and_its_rounds(world, run, capsys):
    own = (f"run={run}", "task=show", "device=cpu", "max_new_tokens=9", "text='What is [b]a[/b] tool?'")
    evaluated(*own)
    shown = capsys.readouterr().out
    assert "<|im_start|>user\nWhat is [b]a[/b] tool?<|im_end|>\n<|im_start|>assistant\n" in shown
    assert "9 tokens" in shown
    evaluated(*own, "by_round=true", "system=Be brief.", "length=2")
    shown = capsys.readouterr().out
    assert "<|im_start|>system\nBe brief.<|im_end|>" in shown
    assert "   0  first token  " in shown
    assert "   1   " in shown
    assert " of  2  " in shown
    evaluated(*own, "tree=[2,1]", "temperature=1")
    assert "9 tokens" in capsys.readouterr().out


def test_show_takes_the_prompts_of_a_source(world, run, capsys):
    evaluated(f"run={run}", "task=show", "num_prompts=1", *on(world))
    shown = capsys.readouterr().out
    assert shown.count("What maths is") == 1
    assert "14 tokens" in shown


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["num_prompts=abc"], ConfigError, r"^num_prompts: got 'abc'.*Integer"),
        (["num_prompts=0"], ConfigError, r"^num_prompts: got 0; accepted: 1 or more, or null"),
        (["turns=0"], ConfigError, r"^turns: got 0; accepted: 1 or more, or null"),
        (["num_speed_prompts=abc"], ConfigError, r"^num_speed_prompts: got 'abc'.*Integer"),
        (["num_speed_prompts=0"], ConfigError, r"^num_speed_prompts: got 0; accepted: 1 or more"),
        (["allow_other_target=maybe"], ConfigError, r"^allow_other_target: got 'maybe'"),
        (["temperature=-1"], ConfigError, r"temperature: got -1.0; accepted: 0 \(greedy\) or 0.001 and more"),
        (["temperature=1", "top_p=0"], ConfigError, r"top_p: got 0.0; accepted: above 0"),
        (["length=9"], ConfigError, r"^length: got 9; accepted: 'auto' or 1 to 3"),
        (["tree=wide"], ConfigError, r"^tree: got 'wide'; accepted: a list of children a slot"),
        (["tree=[2,2,2,2]"], ConfigError, r"^tree: got \[2, 2, 2, 2\], of 4 levels; accepted: up to 3"),
        (["batch_size=0"], ConfigError, r"^batch_size: got 0; accepted: 1 or more"),
        (["batch_size=some"], ConfigError, r"^batch_size: got 'some'"),
        (["max_new_tokens=4"], ConfigError, r"^max_new_tokens: got 4; accepted: 5 or more"),
        (["max_new_tokens=512"], DataError, r"2 of 2 left out: longer than the 0 tokens that max_new_tokens leaves"),
        (["out={world}/maths.jsonl/x"], CheckpointError, r"^out: .*/x cannot be made: .*choose another folder"),
        (["text=Hello"], ConfigError, r"^text: a prompt of your own is for task=show"),
        (["run=null"], ConfigError, r"^run: got run=None and compare=None; set one of them: run=outputs/NAME, or"),
        (["compare=[ngram]"], ConfigError, r"^run: got run=.* and compare=\('ngram',\); set one of them"),
        (["run=null", "compare=ngram"], ConfigError, r"^compare: got 'ngram'"),
        (
            ["run=null", "compare=[]"],
            ConfigError,
            r"^compare: it is empty; accepted: run folders and baselines",
        ),
        (["run=null", "compare=[ngram,ngram]"], ConfigError, r"^compare: 'ngram' is there twice"),
        (
            ["run=null", "compare=[ngram]", "task=show"],
            ConfigError,
            r"^compare: task=show is about one drafter",
        ),
        (["run=ngrams"], ConfigError, r"^run: got 'ngrams', which is no folder and no baseline; accepted: .*ngram, dr"),
        (["run=null", "compare=[ngram,a/b]"], CheckpointError, r"no folder a/b"),
        (["run={world}"], CheckpointError, r"^run: .* is not a run of train.py"),
        (["baselines.ngram.max_ngram=0", "run=ngram"], ConfigError, r"^baselines.ngram.max_ngram: got 0; accepted: 1"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else "",
)
def test_wrong_settings_are_named(world, run, overrides, error, message, monkeypatch):
    monkeypatch.setattr("drafters.decoding.runner.decode", None)  # nothing is decoded before
    own = [f"run={run}", "device=cpu", "source=jsonl", f"source.path={world}/maths.jsonl", "max_new_tokens=14"]
    if "run=ngram" in overrides:
        own += [*OTHER, f"target.weights={world}/target"]
    with pytest.raises(error, match=message) as told:
        evaluated(*own, *(one.format(world=world) for one in overrides))
    assert "\n" not in str(told.value)
