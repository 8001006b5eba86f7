# The script for a GPU, tried on a CPU: its runner with stages that end well, fail, crash, hang and come too late; and
# the stages themselves on toy sizes.

import argparse
import json
import sys
import time

import pytest
import torch

from tests.gpu import check_gpu, run, speed, stages, steps
from tests.gpu.report import Context, read_rows
from tests.gpu.stages import STAGES, Stage

pytestmark = pytest.mark.usefixtures("one_thread")
ROW = '{"stage": "x", "what": "w", "figure": "1 ms", "ok": true, "facts": {}}'
SCRIPTS = {
    "fine": f"open(rows, 'a').write('{ROW}\\n')",
    "hangs": f"open(rows, 'a').write('{ROW}\\n' + '{{\"cut off'); time.sleep(60)",
    "stubborn": "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
    "crashes": "os._exit(3)",
    "late": "1 / 0",
}


@pytest.fixture
def scripts(monkeypatch):
    """Stages that are small scripts."""
    monkeypatch.setattr(run, "STAGES", {name: Stage(run=print, limit=1.0) for name in SCRIPTS})
    monkeypatch.setattr(run, "GRACE", 0.2)

    def command_of(context):
        begin = f"import os, signal, sys, time; rows = {str(context.rows)!r}; "
        return [sys.executable, "-S", "-c", begin + SCRIPTS[context.stage]]

    monkeypatch.setattr(run, "command_of", command_of)


def asked(**settings):
    return argparse.Namespace(**{"device": "cpu", "tiny": True, "minutes": 9.5, "only": None, **settings})


def test_a_stage_that_fails_hides_no_other(scripts, tmp_path):
    started = time.monotonic()
    rows, skipped = run.run_all(asked(only=["fine", "hangs", "stubborn", "crashes"]), tmp_path)
    assert time.monotonic() - started < 20
    assert skipped == []
    assert [(row["what"], row["ok"]) for row in rows] == [
        ("w", True),
        ("w", True),
        ("time", False),
        ("time", False),
        ("exit", False),
    ]
    assert "stopped after 1 s" in rows[2]["figure"]
    assert "status 3" in rows[4]["figure"]
    assert not run.all_fine(rows)


def test_what_comes_too_late_is_named(scripts, tmp_path):
    rows, skipped = run.run_all(asked(minutes=0.0), tmp_path)
    assert (rows, skipped) == ([], list(run.STAGES))
    table = run.table_of(rows, skipped)
    assert table.row_count == len(skipped)


def test_the_table_comes_last_and_the_summary_is_written(scripts, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["run", "--device", "cpu", "--tiny", "--only", "fine"])
    assert run.main() == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ok"]
    assert summary["rows"] == [json.loads(ROW)]
    assert capsys.readouterr().out.splitlines()[-1].split() == ["x", "w", "1", "ms", "ok"]
    monkeypatch.setattr(sys, "argv", ["run", "--device", "cpu", "--tiny", "--only", "crashes"])
    assert run.main() == 1
    assert capsys.readouterr().out.splitlines()[-1].split()[-1] == "FAILED"


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run"])
    with pytest.raises(SystemExit, match="no CUDA device here; --device cpu --tiny"):
        run.main()


def test_every_check_is_a_stage(monkeypatch):
    assert {f"check {name}" for name in check_gpu.CHECKS} <= STAGES.keys()
    monkeypatch.setitem(check_gpu.CHECKS, "another", lambda args: {"seconds": 1})
    again = stages._stages()
    assert again.keys() - STAGES.keys() == {"check another"}
    assert list(again)[-1] == "check training"


@pytest.fixture
def context(tmp_path):
    return Context(stage="here", device=torch.device("cpu"), tiny=True, folder=tmp_path, rows=tmp_path / "rows.jsonl")


def rows_of(context):
    rows = read_rows(context.rows)
    assert run.all_fine(rows)
    return {row["what"]: row for row in rows}


def test_steps(context):
    steps.measure_steps(context, "qwen3_8b")
    rows = rows_of(context)
    assert {what for what, row in rows.items() if row["ok"] is None} == {
        "ours, whole vocabulary, compiled",
        "ours, 32k, compiled",
    }
    for what in ("whole vocabulary", "32k"):
        ours, theirs = rows[f"ours, {what}"]["facts"], rows[f"plain reference, {what}"]["facts"]
        assert ours["positions"] == theirs["positions"] > 0
        ratio = rows[f"ours / plain reference, {what}"]["facts"]
        assert ratio["speed_ratio"] == ours["positions_per_second"] / theirs["positions_per_second"]
        assert ratio["anchors"] == 12
        for one in (ours, theirs):
            assert one["mfu"] == pytest.approx(one["tflop"] / (one["ms"] / 1e3) / one["peak_tflops"])


def test_a_reference_that_does_not_fit_is_compared_with_fewer_anchors(context, monkeypatch):
    real = steps.reference_loss

    def too_large(drafter, batch, head):
        if drafter.config.num_anchors > 3:
            raise torch.OutOfMemoryError("too large")
        return real(drafter, batch, head)

    monkeypatch.setattr(steps, "reference_loss", too_large)
    bench = steps.Bench(context, steps.SIZES["tiny"])
    steps.compare(bench, None, reduced=False)
    rows = rows_of(context)
    tried = [what for what in rows if what.startswith("plain reference")]
    assert tried == [f"plain reference, whole vocabulary{more}" for more in ("", ", 6 anchors", ", 3 anchors")]
    assert rows[tried[0]]["figure"] == "out of memory"
    ours, theirs = rows["ours, whole vocabulary, 3 anchors"]["facts"], rows[tried[-1]]["facts"]
    assert ours["positions"] == theirs["positions"]
    assert rows["ours / plain reference, whole vocabulary"]["facts"]["anchors"] == 3


def test_profile(context):
    steps.profile_step(context, "qwen3_8b")
    rows = rows_of(context)
    assert "aten::mm" in rows
    assert rows["aten::mm"]["facts"]["calls"] >= 10
    assert len(rows) == steps.KERNELS + 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_decoding_and_capture(context):
    speed.decode_latency(context)
    speed.capture_speed(context)
    rows = rows_of(context)
    for name in ("no drafter", "float", "packed int8", "packed int4"):
        for batch in (1, 16):
            facts = rows[f"{name}, batch {batch}"]["facts"]
            assert facts["verify_ms"] > 0
            assert facts["rounds"] >= 1
    assert rows["capture / forward with logits"]["facts"]["ratio"] > 0
