# evaluate.py about confidence and costs, on a small world: what is fitted is stored with the drafter and judged on
# other prompts, profiles are measured or given, thresholds and schedules are replayed, and a schedule decodes.

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

from drafters.decoding.report import Report
from drafters.errors import CheckpointError, ConfigError, DataError
from drafters.scheduling.calibration import Calibration
from drafters.scheduling.observations import Observations
from drafters.scheduling.profile import CostProfile
from tests.door_world import make_run
from tests.evaluating import evaluated, on

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ("task.rows=[1,3]", "task.repeats=2", "task.warmup=1")
FEW = ("task.concurrency=[1,3]", "task.tokens_per_request=8", "task.num_steps=20", "task.warmup_steps=2")


@pytest.fixture(scope="module")
def studied(world):
    """A run that was calibrated and profiled."""
    folder = make_run(world, "studied")
    evaluated(f"run={folder}", "task=calibrate", *on(world))
    evaluated(f"run={folder}", "task=profile", *on(world), *SMALL)
    return folder


def only(pattern, folder):
    (found,) = folder.glob(pattern)
    return found


def test_a_fit_is_stored_with_the_drafter_and_judged_by_other_prompts(world, studied):
    calibration = Calibration.load(studied / "drafter")
    assert calibration.method == "beta"
    assert len(calibration.temperatures) == 3
    out = only("calibrate/*", studied)
    assert {path.name for path in out.iterdir()} == {
        *("observations.safetensors", "observations.json", "reliability.json", "reliability.md", "reliability.png"),
        "environment.json",
    }
    found = json.loads((out / "reliability.json").read_text())
    observations = Observations.load(out / "observations.safetensors")
    assert found["rounds"] == observations.num_rounds > 0
    assert found["fitted_here"] is True
    assert found["temperatures"] == list(calibration.temperatures)
    before = (studied / "drafter" / "calibration.json").read_bytes()
    evaluated(f"run={studied}", "task=calibrate", "task.fit=false", *on(world, "code"), f"out={world}/judged")
    judged = json.loads((world / "judged" / "reliability.json").read_text())
    assert judged["fitted_here"] is False
    assert (studied / "drafter" / "calibration.json").read_bytes() == before


def test_a_profile_is_of_this_machine_and_this_drafter(studied):
    profile = CostProfile.load(studied / "profile" / "profile.json")
    assert (studied / "profile" / "profile.png").is_file()
    assert {(point.rows, point.tokens) for point in profile.verify} == {
        (r, r * w) for r in (1, 3) for w in (1, 2, 3, 4)
    }
    assert {(point.rows, point.length) for point in profile.draft} == {(r, k) for r in (1, 3) for k in range(4)}
    assert profile.layout == "padded"


@pytest.mark.parametrize("schedule", ["gated", "prefix", "threshold", "fixed", "off"])
def test_a_schedule_decodes_the_same_text_and_says_what_it_did(world, studied, schedule):
    out = world / f"by-{schedule}"
    evaluated(f"run={studied}", f"schedule={schedule}", *on(world), f"out={out}")
    report = Report.from_dict(json.loads((out / "report.json").read_text()))
    assert report.divergences["prompts"] == 0
    assert report.schedule["scheduler"].lower() == schedule
    assert report.schedule["calibration"] == (None if schedule in ("fixed", "off") else "beta")
    assert 0 <= report.schedule["accepted"] <= report.schedule["drafts_verified"] <= report.block_size
    if schedule != "gated":  # whose choice is one of measured costs
        assert (report.schedule["not_drafting"] == 1) == (schedule == "off")
    assert report.schedule["scheduler"] in (out / "report.md").read_text()


def test_thresholds_are_swept_with_speeds_where_there_is_a_profile(world, studied):
    evaluated(f"run={studied}", "task=sweep", "task.thresholds=[0,0.5,1]", *on(world), f"out={world}/swept")
    found = json.loads((world / "swept" / "sweep.json").read_text())
    rows = found["thresholds"]
    assert set(found["recommended"]) == {"schedule=threshold", "llama.cpp --spec-draft-p-min"}
    assert "llama.cpp --spec-draft-p-min" in (world / "swept" / "sweep.md").read_text()
    assert [row["threshold"] for row in rows] == [0, 0.5, 1]
    assert rows[0]["verified"] > rows[2]["verified"] == 0
    assert all(row["tokens_per_second"] > 0 for row in rows)
    bare = world / "outputs" / "bare"
    shutil.copytree(studied, bare)
    shutil.rmtree(bare / "profile")
    evaluated(
        f"run={bare}", "task=sweep", "task.thresholds=[0.5]", "calibrated=false", *on(world), f"out={world}/bared"
    )
    found = json.loads((world / "bared" / "sweep.json").read_text())
    assert found["recommended"] == {}
    assert found["thresholds"][0]["tokens_per_second"] is None
    assert (world / "bared" / "sweep.png").is_file()


def test_schedules_are_simulated_under_load(world, studied):
    evaluated(f"run={studied}", "task=simulate", *FEW, *on(world), f"out={world}/simulated")
    found = json.loads((world / "simulated" / "simulation.json").read_text())["simulations"]
    names = {"no drafter", "off", "fixed", "prefix", "asynchronous", "gated", "gated_prefix"}
    assert {(one["name"], one["concurrency"]) for one in found} == {(name, c) for name in names for c in (1, 3)}
    assert all(one["tokens_per_second"]["value"] > 0 for one in found)
    assert {path.suffix for path in (world / "simulated").iterdir()} == {".json", ".md", ".png", ".safetensors"}


def test_what_was_recorded_for_a_simulation_is_replayed_and_nothing_else(world, studied, monkeypatch):
    evaluated(f"run={studied}", "task=simulate", *FEW, *on(world), f"out={world}/first")
    monkeypatch.setattr("drafters.decoding.runner.decode", None)
    path = world / "first" / "observations.safetensors"
    contexts = Observations.load(path).context_N
    assert (contexts.diff()[contexts.diff() > 0] == 1).all()
    evaluated(f"run={studied}", "task=simulate", *FEW, *on(world), f"task.observations={path}", f"out={world}/second")
    first, second = (json.loads((world / name / "simulation.json").read_text()) for name in ("first", "second"))
    assert first["simulations"] == second["simulations"]
    of_blocks = only("calibrate/*", studied) / "observations.safetensors"
    for task, given, wanted in (("simulate", of_blocks, "True"), ("sweep", path, "False")):
        with pytest.raises(ConfigError, match=rf"recorded with everywhere = .*, this is {wanted}"):
            evaluated(f"run={studied}", f"task={task}", *on(world), f"task.observations={given}")


@pytest.mark.parametrize("text", ["[1]", "null", "{"])
def test_damaged_circumstances_of_rounds_are_refused_by_name(world, studied, tmp_path, text):
    kept = only("calibrate/*", studied) / "observations.safetensors"
    path = shutil.copy(kept, tmp_path)
    (tmp_path / "observations.json").write_text(text)
    with pytest.raises(DataError, match=r"observations\.json: "):
        evaluated(f"run={studied}", "task=sweep", *on(world), f"task.observations={path}")


def test_a_profile_of_other_hardware_can_be_given(world, studied):
    path = world / "theirs.json"
    path.write_text(json.dumps({"layout": "ragged", "verify": [{"tokens": n, "seconds": 0.01} for n in (1, 64)]}))
    given = (*FEW, *on(world), f"profile={path}", f"out={world}/theirs")
    evaluated(f"run={studied}", "task=simulate", *given)
    found = json.loads((world / "theirs" / "simulation.json").read_text())
    assert found["profile"]["layout"] == "ragged"


def test_what_is_missing_is_named(world, studied):
    bare = make_run(world, "nothing")
    for overrides, error, message in (
        (["schedule=prefix"], ConfigError, r"^profile: .*profile\.json: no such file; make it with task=profile"),
        (["schedule=threshold"], CheckpointError, r"calibration\.json: no such file; run task=calibrate"),
        (["task=calibrate", "task.fit=false"], CheckpointError, r"calibration\.json: no such file; run task=calibrate"),
        (["task=sweep"], ConfigError, r"^task\.observations: got null, and the run has none; run task=calibrate"),
        (["task=simulate"], ConfigError, r"^profile: .*profile\.json: no such file; make it with task=profile"),
        (
            ["task=calibrate", "task.method=best"],
            ConfigError,
            r"^task.method: got 'best'; accepted: temperature, affine, beta",
        ),
        (["task=calibrate", "task.signal=best"], ConfigError, r"^task.signal: got 'best'; accepted: auto, confidence"),
        (["task=profile", "task.rows=[0]"], ConfigError, r"rows: got \[0\]"),
        (["task=simulate", "task.concurrency=[1,0]"], ConfigError, r"^task.concurrency: got \[0\]; accepted"),
        (["task=show", "schedule=prefix"], ConfigError, r"^schedule: it is for task=measure; task=show decodes"),
        (["task=calibrate", "schedule=off"], ConfigError, r"^schedule: it is for task=measure; task=calibrate"),
        (["task=sweep", "+task.much=1"], ConfigError, "much"),
        (["schedule=fixed", "length=2"], ConfigError, r"^schedule: it decides how many drafts are verified"),
        (["schedule=fixed", "schedule.length=9"], ConfigError, r"^schedule\.length: got 9; accepted: 0 to 3"),
        (["schedule=threshold", "schedule.threshold=2"], ConfigError, r"^schedule.threshold: got 2"),
    ):
        with pytest.raises(error, match=message):
            evaluated(f"run={bare}", *on(world), *overrides)
    with pytest.raises(ConfigError, match=r"^compare: task=calibrate is about one drafter"):
        evaluated("run=null", f"compare=[{bare},{studied}]", "task=calibrate", *on(world))


def test_a_calibration_of_other_weights_is_refused_and_of_another_sampling_warned_of(world, studied):
    other = make_run(world, "other-weights", seed=1)
    shutil.copy(studied / "drafter" / "calibration.json", other / "drafter")
    with pytest.raises(CheckpointError, match="fitted for a drafter with weights"):
        evaluated(f"run={other}", "schedule=threshold", *on(world))
    warm = ("temperature=1", *on(world), f"out={world}/warm")
    with pytest.warns(UserWarning, match="fitted at temperature=0, used at temperature=1"):
        evaluated(f"run={studied}", "schedule=threshold", *warm)
    with pytest.raises(ConfigError, match=r"recorded with sampling = .*'temperature': 0.0.*this is .*'temperature': 1"):
        evaluated(f"run={studied}", "task=sweep", "task.thresholds=[0.5]", "calibrated=false", *warm)


def test_what_was_recorded_is_judged_again_without_decoding(world, studied, monkeypatch):
    monkeypatch.setattr("drafters.decoding.runner.decode", None)
    path = only("calibrate/*", studied) / "observations.safetensors"
    before = (studied / "drafter" / "calibration.json").read_bytes()
    own = (f"task.observations={path}", *on(world), f"out={world}/again")
    evaluated(f"run={studied}", "task=calibrate", "task.fit=false", *own)
    assert json.loads((world / "again" / "reliability.json").read_text())["method"] == "beta"
    assert (studied / "drafter" / "calibration.json").read_bytes() == before


def test_the_signal_that_says_more_is_calibrated(world):
    """A confidence of pure chance beside a likeliest token's probability that is right, and the other way round."""
    folder = make_run(world, "signals")
    evaluated(f"run={folder}", "task=calibrate", *on(world))
    path = only("calibrate/*", folder) / "observations.safetensors"
    told = path.with_suffix(".json").read_bytes()
    recorded = Observations.load(path)
    right_NG = torch.where(recorded.survived_NG, 0.9, 0.1).double().masked_fill(~recorded.counted_NG, math.nan)
    chance_NG = torch.full_like(right_NG, 0.5).masked_fill(~recorded.counted_NG, math.nan)
    for confidence_NG, likeliest_NG, best in ((chance_NG, right_NG, "likeliest"), (right_NG, chance_NG, "confidence")):
        made = world / f"{best}.safetensors"
        replace(recorded, confidence_NG=confidence_NG, likeliest_NG=likeliest_NG).save(made)
        made.with_suffix(".json").write_bytes(told)
        given = (f"run={folder}", "task=calibrate", f"task.observations={made}", *on(world), f"out={world}/by-{best}")
        evaluated(*given)
        assert Calibration.load(folder / "drafter").signal == best
        found = json.loads((world / f"by-{best}" / "reliability.json").read_text())
        assert found["signal"] == best
        assert found["squared_errors"][best] < min(v for name, v in found["squared_errors"].items() if name != best)
        evaluated(*given, "task.signal=confidence")
        assert Calibration.load(folder / "drafter").signal == "confidence"


def test_a_stopped_calibration_goes_on(world, monkeypatch):
    folder = make_run(world, "stopped")
    from drafters.decoding import runner

    decode, calls = runner.decode, []

    def stopping(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decode(*args, **kwargs)

    monkeypatch.setattr(runner, "decode", stopping)
    with pytest.raises(KeyboardInterrupt):
        evaluated(f"run={folder}", "task=calibrate", *on(world))
    monkeypatch.setattr(runner, "decode", lambda *a, **k: calls.append(a) or decode(*a, **k))
    evaluated(f"run={folder}", "task=calibrate", "resume=true", *on(world))
    assert len(calls) == 3
    assert Calibration.load(folder / "drafter").provenance["rounds"] > 0


def test_baselines_can_be_scheduled_without_a_calibration(world, studied):
    out = world / "ngram-fixed"
    target = ("target=smollm2", "target.sha256=null", "target.mask_token=0", "target.dtype=float32")
    evaluated("run=ngram", "schedule=fixed", *target, f"target.weights={world}/target", *on(world), f"out={out}")
    report = Report.from_dict(json.loads((out / "report.json").read_text()))
    assert report.schedule["scheduler"] == "Fixed"
    assert replace(report, schedule=None).schedule is None
