# A run's folder: claimed by one process, begun with one set of settings.

import json
import multiprocessing

import pytest

from drafters.errors import CheckpointError
from drafters.runs import claim, open_run

SETTINGS = {
    "drafter": {"num_layers": 2},
    "optim": {"minutes": 1},
    "logger": {"name": "csv"},
    "source": {},
    "data": {},
    "target": {},
    "cwd": "/",
}


def hold(folder, ready, done):
    with claim(folder, SETTINGS):
        ready.set()
        done.wait(20)


def test_claim_writes_settings_and_finds_the_checkpoint(tmp_path):
    with claim(tmp_path / "run", SETTINGS) as run:
        assert run.checkpoint is None
        (run.folder / "checkpoints").mkdir()
        (run.folder / "checkpoints" / "last.ckpt").write_text("x")
    with claim(tmp_path / "run", {**SETTINGS, "logger": {"name": "wandb"}}) as run:
        assert run.checkpoint == run.folder / "checkpoints" / "last.ckpt"
    with pytest.raises(CheckpointError, match="has no drafter yet"):
        open_run(tmp_path / "run")
    (tmp_path / "run" / "drafter").mkdir()
    assert open_run(tmp_path / "run")[1]["drafter"] == {"num_layers": 2}


def test_other_settings_are_refused_by_name_and_allowed_by_resume(tmp_path):
    wrong = {**SETTINGS, "drafter": {"num_layers": 0}}
    with claim(tmp_path, wrong):
        pass
    # Nothing was made with the wrong ones, so they do not bind.
    with claim(tmp_path, SETTINGS) as run:
        run.drafter.mkdir()
        run.report.write_text("{}")
    other = {**SETTINGS, "drafter": {"num_layers": 3}}
    with pytest.raises(CheckpointError, match=r"drafter\.num_layers was 2, now 3.*name="), claim(tmp_path, other):
        pass
    with claim(tmp_path, other, resume=True):
        pass
    assert json.loads((tmp_path / ".hydra" / "settings.json").read_text()) == other
    assert (tmp_path / "report.before.json").is_file()
    assert not (tmp_path / "report.json").exists()


def test_resume_cannot_change_what_a_checkpoint_holds(tmp_path):
    with claim(tmp_path, SETTINGS) as run:
        (run.folder / "checkpoints").mkdir()
        (run.folder / "checkpoints" / "last.ckpt").write_text("x")
        run.report.write_text("{}")
    other = {**SETTINGS, "drafter": {"num_layers": 3}, "optim": {"minutes": 2}}
    refused = r"cannot go on with another drafter\.num_layers: it was 2, now 3"
    with pytest.raises(CheckpointError, match=refused), claim(tmp_path, other, resume=True):
        pass
    assert json.loads((tmp_path / ".hydra" / "settings.json").read_text()) == SETTINGS
    assert (tmp_path / "report.json").is_file()


def test_how_batches_are_read_may_change_on_the_way(tmp_path):
    begun = {**SETTINGS, "data": {"prefetch": 2, "max_tokens": 200}}
    with claim(tmp_path, begun) as run:
        (run.folder / "checkpoints").mkdir()
        (run.folder / "checkpoints" / "last.ckpt").write_text("x")
    with claim(tmp_path, {**begun, "data": {"prefetch": 0, "max_tokens": 200}}):
        pass
    other = {**begun, "data": {"prefetch": 2, "max_tokens": 300}}
    with pytest.raises(CheckpointError, match=r"data\.max_tokens"), claim(tmp_path, other, resume=True):
        pass


def test_settings_of_another_kind_are_refused(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "settings.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"damaged .*should hold an object"):
        open_run(tmp_path)
    (tmp_path / ".hydra" / "settings.json").write_text("{}")
    with pytest.raises(CheckpointError, match="lacks cwd, source, data, target"):
        open_run(tmp_path)


def test_a_run_in_use_is_refused(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready, done))
    process.start()
    assert ready.wait(20)
    with pytest.raises(CheckpointError, match="in use by another process"), claim(tmp_path, SETTINGS):
        pass
    done.set()
    process.join(20)
    with claim(tmp_path, SETTINGS):
        pass


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no folder .*train\.py"):
        open_run(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"not a run of train\.py"):
        open_run(tmp_path)
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "settings.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"), claim(tmp_path, SETTINGS):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": None}, "target=null, which should be settings by name"),
        ({"source": []}, r"source=\[\], which should be settings by name"),
        ({"trainer": "x"}, 'trainer="x", which should be settings by name'),
        ({"logger": [1]}, r"logger=\[1\], which should be settings by name"),
        ({"cwd": 4}, "cwd=4, which should be text"),
        ({"run_dir": None}, "run_dir=null, which should be text"),
    ],
)
def test_stored_settings_of_another_kind_are_refused(tmp_path, changes, message):
    path = tmp_path / ".hydra" / "settings.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**SETTINGS, "logger": None}))
    open_run(tmp_path, needs_drafter=False)
    path.write_text(json.dumps(SETTINGS | changes))
    with pytest.raises(CheckpointError, match=rf"settings\.json has {message}; it is damaged"):
        open_run(tmp_path, needs_drafter=False)
