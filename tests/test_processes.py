# evaluate.py as several processes: one report, with the numbers of one process; one message where it fails; and a
# measurement that two began is finished by one.

import time
from dataclasses import fields

import pytest

import evaluate
from drafters.decoding import runner
from drafters.decoding.comparison import Comparison
from tests.door_world import ROOT, make_run, settings, write_rows
from tests.processes import torchrun

pytestmark = pytest.mark.usefixtures("one_thread")
# Rank 1 ends without a word in place of its fourth decoding after the warm-up.
DYING = """
import os, sys
from drafters.decoding import runner
decode, left = runner.decode, [3 + 3]
def dying(*args, **rest):
    left[0] -= os.environ["RANK"] == "1"
    if left[0] < 0:
        os._exit(9)
    return decode(*args, **rest)
runner.decode = dying
import evaluate
evaluate.main()
"""


@pytest.fixture(scope="module")
def command(world):
    """Overrides that compare a run with a baseline on two sources of two turns each."""
    run = make_run(world, "run")
    paths = []
    for name in ("apples", "pears"):
        rows = [{"turns": [f"What {name} are {i} {i} {i}?", f"And {i} other {name}?"]} for i in range(5)]
        paths.append(str(write_rows(world / f"{name}.jsonl", rows)))
    return [
        *(f"compare=[{run},ngram]", "baselines.ngram.block_size=2", "device=cpu", "length=2"),
        *("source=jsonl", f"source.path=[{','.join(paths)}]", "max_new_tokens=20", "profile_rounds=2"),
    ]


def in_two(*overrides, script="evaluate.py", timeout=100):
    """What two processes say: (exit code, stdout, stderr)."""
    done = torchrun(script, *overrides, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


def acceptance(folder):
    """Everything that a comparison says of acceptance, without what a clock said."""
    reports = Comparison.load(folder / "comparison.json").reports
    names = ("accepted_length", "accepted_length_ci95", "acceptance_by_position", "acceptance_by_position_ci95")
    names += ("survival_by_position", "accepted_histogram", "verify_rate", "prompts", "rounds", "tokens")
    names += ("accepted_length_at_draft_length", "divergences")
    found = {}
    for name, report in reports.items():
        found[name] = {one: getattr(report, one) for one in names}
        for kind in ("by_source", "by_turn", "by_context"):
            for key, part in getattr(report, kind).items():
                shared = [f.name for f in fields(part) if "second" not in f.name and f.name != "speedup"]
                found[name][kind, key] = repr({one: getattr(part, one) for one in shared})
    return reports, found


@pytest.fixture(scope="module")
def alone(command, one_thread, tmp_path_factory):
    """What one process finds."""
    out = tmp_path_factory.mktemp("alone")
    evaluate.evaluate(settings("evaluate", *command, f"out={out}"))
    return acceptance(out)


@pytest.mark.parametrize("batch_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_processes_find_what_one_finds(command, alone, tmp_path, batch_size):
    reports, expected = alone
    assert {len(report.by_source) for report in reports.values()} == {2}
    assert reports["ngram"].accepted_histogram[1:] != [0, 0]
    code, out, err = in_two(*command, f"batch_size={batch_size}", f"out={tmp_path}")
    assert code == 0, err
    found, numbers = acceptance(tmp_path)
    assert numbers == expected
    assert [(report.processes, report.batch_size) for report in found.values()] == [(2, batch_size)] * 2
    assert all(report.speedup > 0 for report in found.values())
    assert out.count("Drafters compared") == out.count("Written: ") == 1
    assert not list(tmp_path.glob("progress*"))


def test_an_error_ends_both_with_one_message(command, tmp_path):
    began = time.monotonic()
    code, out, err = in_two(*command, f"source.path={tmp_path}/absent.jsonl", f"out={tmp_path}/out")
    assert code != 0
    assert time.monotonic() - began < 60
    assert err.count("error: source.path: ") == 1
    assert err.count(f"{tmp_path}/absent.jsonl") == 1
    assert "Drafters compared" not in out
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_two_began_is_finished_by_one(command, alone, tmp_path, monkeypatch, capsys):
    script = tmp_path / "dying.py"
    script.write_text(DYING + "\n")
    own = [*command, f"out={tmp_path}/out"]
    code, out, err = in_two(*own, "--config-path", str(ROOT / "conf"), script=script)
    assert code != 0
    assert "ended or gave no answer" in err or "exitcode  : 9" in err
    assert "Drafters compared" not in out
    assert len(list((tmp_path / "out").glob("progress*.jsonl"))) == 2
    # The three units of rank 1 are not decoded again, nor are those of rank 0, as many as it had the time for.
    calls = []
    decode = runner.decode
    monkeypatch.setattr(runner, "decode", lambda *args, **rest: calls.append(rest) or decode(*args, **rest))
    evaluate.evaluate(settings("evaluate", *own, "resume=true"))
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "finished parts" in line]
    taken = int(said.split()[0])
    assert taken >= 3
    resumed = len(calls)
    evaluate.evaluate(settings("evaluate", *own, f"out={tmp_path}/whole"))
    assert resumed == len(calls) - resumed - taken
    assert acceptance(tmp_path / "out")[1] == acceptance(tmp_path / "whole")[1] == alone[1]
    assert not list((tmp_path / "out").glob("progress*"))
