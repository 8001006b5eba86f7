# evaluate.py on a small world: what it measures, alone and side by side, whose prompts it takes, where it writes, what
# it says when settings are wrong. Its run has a random drafter; what a trained one leaves is tested in test_doors.py.

import json
import shutil
from pathlib import Path

import pytest
import torch

import evaluate
import train
from data.sources import SourceConfig, load_conversations, load_splits
from drafters.chat import ChatEncoder
from drafters.decoding.comparison import Comparison
from drafters.decoding.dialogue import Dialogue
from drafters.decoding.measure import MeasureConfig
from drafters.decoding.report import Report
from drafters.errors import CheckpointError, ConfigError, DataError
from drafters.types import Sampling
from tests.door_world import ANSWER, make_run, train_settings, write_rows
from tests.evaluating import OTHER, evaluated, on, prompts_of
from tests.tiny import tiny_llama
from tests.tiny_chat import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_run_s_own_source_is_split_as_the_run_split_it(world, measured):
    """Its rows have no split: taken whole they would measure what was trained on."""
    source = ("source=jsonl", f"source.path={world}/chats.jsonl")
    own = SourceConfig(path=str(world / "chats.jsonl"))
    _, held_out = load_splits(own, validation=0.2, seed=0)
    found = measured(*source)
    assert len(held_out) == 4
    encoder = ChatEncoder(tiny_tokenizer("chatml"), max_length=512)
    assert found.place.facts["weights"] == f"{world}/target"
    assert found.place.facts["prompts"] == {
        "source": [f"{world}/chats.jsonl"],
        "split": "validation, as the run split it",
        "num_prompts": 4,
        "template_hash": encoder.template_hash,
    }
    expected = [encoder.prompt(conversation.messages[:1]).tolist() for conversation in held_out]
    assert sorted(prompts_of(found)) == sorted(expected)
    assert len(measured(*source, "split=train").dialogues) == 16
    assert len(measured(*source, "split=null").dialogues) == len(list(load_conversations(own))) == 20


def test_a_comparison_leaves_out_what_any_of_its_runs_trained_on(world, run, measured):
    def held_out(seed):
        _, rows = load_splits(SourceConfig(path=str(world / "chats.jsonl")), validation=0.2, seed=seed)
        return {row.messages for row in rows}

    seed = next(seed for seed in range(1, 99) if 0 < len(held_out(0) & held_out(seed)) < 4)
    other = make_run(world, "other-seed")
    path = other / ".hydra" / "settings.json"
    own = json.loads(path.read_text())
    own["data"]["seed"] = seed
    path.write_text(json.dumps(own))
    source = ("source=jsonl", f"source.path={world}/chats.jsonl")
    encoder = ChatEncoder(tiny_tokenizer("chatml"), max_length=512)
    prompts = {
        name: sorted(encoder.prompt(messages[:1]).tolist() for messages in chosen)
        for name, chosen in {"run": held_out(0), "both": held_out(0) & held_out(seed)}.items()
    }
    assert sorted(prompts_of(measured(*source, names=(f"compare=[{run},{other},ngram]",)))) == prompts["both"]
    assert sorted(prompts_of(measured(*source, names=(f"compare=[ngram,{run}]",)))) == prompts["run"]


def test_other_sources_are_taken_whole(world, measured):
    facts = measured("source=jsonl", f"source.path={world}/maths.jsonl").place.facts["prompts"]
    assert facts["split"] == "all rows"
    assert facts["num_prompts"] == 2


def test_a_comparison_end_to_end(world, run, tmp_path, capsys):
    own = (f"out={tmp_path}/out", "baselines.draft_model.block_size=2", "baselines.ngram.block_size=2")
    evaluated(f"compare=[{run},ngram,draft_model]", *on(world, "pairs"), *own)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "comparison.json",
        "comparison.md",
        "comparison.png",
        "environment.json",
    ]
    reports = Comparison.load(tmp_path / "out" / "comparison.json").reports
    assert list(reports) == ["run", "ngram", "draft_model"]
    assert [report.prompts for report in reports.values()] == [4, 4, 4]
    assert [set(report.by_turn) for report in reports.values()] == [{"1", "2"}] * 3
    # The target that drafts for itself has all accepted; an untrained head next to nothing.
    assert reports["draft_model"].acceptance_by_position == [1.0, 1.0]
    assert reports["run"].accepted_length < 1.5
    assert [report.drafter_parameters > 0 for report in reports.values()] == [True, False, False]
    facts = reports["ngram"].provenance
    assert facts["drafter"]["class"] == "drafters.heads.ngram.NgramDrafter"
    assert facts["drafter"]["config"]["block_size"] == 2
    assert len(reports["run"].provenance["drafter"]["sha256"]) == 64
    shown = capsys.readouterr().out
    assert shown.count("Drafters compared") == 1
    assert f"Written: {tmp_path}/out/comparison.md" in shown


def test_the_target_accepts_its_own_drafts_sampled_in_batches(world, tmp_path):
    weights = (*OTHER, f"target.weights={world}/target", f"out={tmp_path}", "temperature=1", "batch_size=2")
    evaluated("run=draft_model", *on(world), *weights)
    report = Report.load(tmp_path / "report.json")
    assert report.acceptance_by_position == [1.0] * 5
    assert (report.temperature, report.batch_size, report.divergences) == (1.0, 2, None)


def test_a_baseline_alone_goes_to_a_folder_of_its_own(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^target: missing; a baseline alone needs one of conf/target"):
        evaluated("run=ngram", *on(world))
    evaluated("run=ngram", *on(world), *OTHER, f"target.weights={world}/target", "baselines.ngram.block_size=2")
    (report,) = tmp_path.glob("outputs/ngram/maths-*/report.json")
    assert Report.load(report).name == "ngram"


def test_other_settings_get_another_folder(world, run, measured, tmp_path):
    same = write_rows(tmp_path / "maths.jsonl", [{"turns": ["Another?"]}])
    plain = ("source=jsonl", f"source.path={world}/maths.jsonl")
    changes = ("temperature=1.0", "length=2", "batch_size=2", "seed=1", "repetition_penalty=1.1", "num_prompts=1")
    changes += ("max_new_tokens=13", "tree=[2,1]", "tree=auto", "system=Be brief.", "num_speed_prompts=1")
    changes += ("profile_rounds=5",)
    outs = {one: measured(*plain, one).place.out for one in ("device=cpu", *changes)}
    outs["another prompt"] = measured("source=jsonl", f"source.path={same}").place.out
    outs["two turns"] = measured("source=jsonl", f"source.path={world}/pairs.jsonl").place.out
    outs["one turn"] = measured("source=jsonl", f"source.path={world}/pairs.jsonl", "turns=1").place.out
    assert len(set(outs.values())) == len(outs)
    assert all(out.parent == run / "evaluate" for out in outs.values())
    marked = {one: out.name.split("-", 1)[1].rsplit("-", 1)[0] for one, out in outs.items() if out.name.count("-") > 1}
    assert marked == {
        "temperature=1.0": "t1",
        "length=2": "length2",
        "batch_size=2": "batch2",
        "tree=[2,1]": "tree",
        "tree=auto": "tree",
    }
    assert measured(*plain).place.out == outs["device=cpu"]
    assert measured(*plain, "thinking=null", "resume=true").place.out == outs["device=cpu"]
    assert measured(*plain, f"out={tmp_path}/own").place.out == tmp_path / "own"
    assert measured(*plain, "out='~/own'").place.out == Path.home() / "own"


def test_comparisons_and_baselines_differ_by_who_takes_part(world, run, measured):
    target = (*OTHER, f"target.weights={world}/target")
    plain = ("source=jsonl", f"source.path={world}/maths.jsonl", *target)
    twin = make_run(world, "twin", seed=1)
    names = [f"[{run},ngram]", f"[ngram,{run}]", f"[{run},{twin}]", f"[{twin},ngram]", "[ngram,draft_model]"]
    outs = [measured(*plain, names=(f"compare={one}",)).place.out for one in names]
    outs += [measured(*plain, names=(f"compare={names[0]}", "baselines.ngram.max_ngram=4")).place.out]
    assert {out.parent for out in outs} == {Path("outputs/compare")}
    alone = [measured(*plain, f"baselines.ngram.max_ngram={n}", names=("run=ngram",)).place.out for n in (3, 4)]
    assert {out.parent for out in alone} == {Path("outputs/ngram")}
    assert len({*outs, *alone}) == 8


def test_a_run_that_was_trained_on_is_measured_beside_its_former_self(world, measured, tmp_path):
    plain = ("source=jsonl", f"source.path={world}/maths.jsonl")
    changing = make_run(world, "changing")
    before = measured(*plain, names=(f"run={changing}",)).place.out
    shutil.rmtree(changing)
    make_run(world, "changing", seed=2)
    after = measured(*plain, names=(f"run={changing}",)).place.out
    assert before.parent == after.parent
    assert before != after


def test_folder_names_are_safe_and_short():
    def dialogues(*names):
        return [Dialogue(source=name, key=name, num_turns=1, encode=lambda _: torch.tensor([1])) for name in names]

    config = MeasureConfig(sampling=Sampling(temperature=0.7), length=12, batch_size=128)
    many = dialogues("../web/chats", "Ünïcode name", *(f"s{i}" for i in range(40)))
    name = evaluate.folder_name(many, config, ["hash"])
    assert len(name) <= 60
    assert name.startswith("web_chats-Ünïcode_name-s0")
    assert "/" not in name
    assert "-t0.7-length12-batch128-" in name
    assert evaluate.folder_name(dialogues(".."), config, ["hash"]).startswith("-t0.7")
    assert evaluate.folder_name(many, config, ["other"]) != name


def test_no_is_no(world, run, tmp_path):
    """`allow_other_target=no` is text in YAML's eyes here, and a text is true."""
    shutil.copytree(world / "target", tmp_path / "tuned")
    tiny_llama(seed=1, vocab_size=len(tiny_tokenizer("chatml"))).save_pretrained(tmp_path / "tuned")
    other = (*OTHER, f"target.weights={tmp_path}/tuned", "allow_other_target=no")
    with pytest.raises(CheckpointError, match="allow_other_target=true"):
        evaluated(f"run={run}", *on(world), *other)


def test_tables_are_on_the_screen_when_they_cannot_be_saved(world, run, tmp_path, monkeypatch, capsys):
    def no_space(report, folder):
        raise OSError(28, "No space left on device")

    own = (f"run={run}", *on(world), f"out={tmp_path}/out")
    with monkeypatch.context() as patch:
        patch.setattr(Report, "save", no_space)
        with pytest.raises(CheckpointError, match="out: cannot be written: no space left"):
            evaluated(*own)
    assert "accepted length (bonus included)" in capsys.readouterr().out
    # With more space, nothing is measured again.
    monkeypatch.setattr("drafters.decoding.runner.Runner.warm_up", lambda *_: None)
    monkeypatch.setattr("drafters.decoding.runner.decode", None)
    evaluated(*own, "resume=true")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("acceptance.png", "environment.json", "report.json", "report.md", "speed.png")
    ]


def test_a_resume_is_refused_in_one_line(world, run, tmp_path, monkeypatch):
    def no_space(report, folder):
        raise OSError(28, "No space left on device")

    own = (f"run={run}", *on(world), f"out={tmp_path}/out")
    with monkeypatch.context() as patch:
        patch.setattr(Report, "save", no_space)
        with pytest.raises(CheckpointError):
            evaluated(*own)
    for change in ("seed=1", "system=Hi.", "length=2"):
        with pytest.raises(DataError, match=r"^resume: .*with other settings, prompts or weights.*resume=false"):
            evaluated(*own, "resume=true", change)


def test_wandb_gets_the_numbers_of_the_runs_that_use_it(world, run, tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr("drafters.training.loggers.log_evaluation", lambda *args: logged.append(args))
    other = make_run(world, "with-wandb")
    evaluated(f"compare=[{run},{other},ngram]", *on(world), f"out={tmp_path}/maths")
    reports = Comparison.load(tmp_path / "maths" / "comparison.json").reports
    assert [folder for folder, *_ in logged] == [run, other]
    for (_, own, one), name in zip(logged, ("run", "with-wandb"), strict=True):
        assert own["logger"]["_target_"].endswith("CSVLogger")
        assert one.values["evaluate/maths/accepted_length"] == reports[name].accepted_length
        assert one.values["evaluate/maths/speedup"] == reports[name].speedup
        assert one.drafter is None
        assert one.pictures == {"evaluate/maths/comparison": tmp_path / "maths" / "comparison.png"}


def test_a_held_out_prompt_without_room_does_not_end_a_run(world, tmp_path):
    rows = [{"prompt": f"Tool {i}?", "response": ANSWER, "split": "train"} for i in range(9)]
    rows += [{"prompt": text, "response": ANSWER, "split": "validation"} for text in ("Sky?", "k" * 490)]
    chats = write_rows(tmp_path / "chats.jsonl", rows)
    own = (f"outputs={tmp_path}", f"source.path={chats}", "data.max_length=64", f"cache.root={tmp_path}/states")
    with pytest.warns(UserWarning, match="prompts: 1 of 2 left out: longer than the 500 tokens"):
        train.train(train_settings(world, *own))
    assert json.loads((tmp_path / "first" / "report.json").read_text())["prompts"] == 1
