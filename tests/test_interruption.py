# Ctrl-C, SIGTERM, a closed terminal, a reader that went away and what the system refuses, in every door: one line that
# says what is kept, nothing half written, and the same command goes on to the same result.

import asyncio
import errno
import fcntl
import importlib
import os
import signal
import subprocess
import sys

import pytest

import evaluate
from data import capture, regenerate
from drafters import stopping, weights
from drafters.door import door, start
from drafters.stopping import asked_to_end, keeping, run_stoppable, stoppable
from export import __main__ as export
from tests.door_world import ROOT, contents, settings, train_overrides
from tests.evaluating import on

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """As in a shell of one's own; a closed terminal would take that of pytest along."""
    for name in stopping.SIZES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(stopping, "leave_terminal", lambda: None)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def signalled(monkeypatch, where, *, at=1, number=signal.SIGINT):
    """A signal comes at the `at`-th call of the function with this name."""
    module, _, name = where.rpartition(".")
    found = importlib.import_module(module)
    call, calls = getattr(found, name), []

    def wrapped(*args, **options):
        calls.append(1)
        if len(calls) == at:
            signal.raise_signal(number)
        return call(*args, **options)

    monkeypatch.setattr(found, name, wrapped)


def ended(run, capsys):
    """What the door said last of a run that is interrupted, after its exit code."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop, door():
        run()
    assert stop.value.code == 130
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("interrupted")]
    return line


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_each_signal_ends_with_one_line(capsys, number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stop, door():
        signal.raise_signal(number)
    assert stop.value.code == 130
    assert capsys.readouterr().err == "interrupted: finished work is kept; the same command goes on from there\n"
    assert signal.getsignal(number) == before


def test_the_innermost_says_what_is_kept(capsys):
    def work():
        with keeping("the outer"), keeping("the inner"):
            signal.raise_signal(signal.SIGTERM)

    assert ended(work, capsys) == "interrupted: the inner"


def test_signals_that_are_ignored_or_answered_by_a_launcher_are_left_alone():
    assert asked_to_end({}) == SIGNALS
    assert asked_to_end({"WORLD_SIZE": "2"}) == (signal.SIGINT,)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    signal.signal(signal.SIGTERM, lambda *_: None)  # submitit
    assert asked_to_end({}) == (signal.SIGINT,)
    with stoppable():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)


def python(text, **options):
    command = [sys.executable, "-c", text]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, **options)


def test_a_second_signal_ends_at_once():
    done = python(
        "import os, signal\n"
        "from drafters.stopping import stoppable\n"
        "with stoppable():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    finally:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "        print('still here')\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_closed_terminal_leaves_nowhere_to_write_to():
    primary, secondary = os.openpty()
    text = (
        "import os, sys\n"
        "from drafters.stopping import leave_terminal\n"
        "leave_terminal()\n"
        "print('gone')\n"
        "sys.stdout.flush()\n"
        "sys.stderr.write('kept')\n"
    )
    command = [sys.executable, "-c", text]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=secondary, stderr=subprocess.PIPE, env=environment, timeout=60, check=True)
    os.close(secondary)
    os.set_blocking(primary, False)
    with pytest.raises(OSError):  # nothing was written
        os.read(primary, 100)
    os.close(primary)
    assert done.stderr == b"kept"


@pytest.mark.parametrize(
    "number",
    [errno.EFBIG, errno.EROFS, errno.EACCES, errno.ENAMETOOLONG, errno.EIO, errno.ESTALE, errno.ENOENT, errno.EINVAL],
    ids=errno.errorcode.get,
)
def test_what_the_system_refuses_is_one_line_with_the_path_and_a_step(capsys, number):
    with pytest.raises(SystemExit) as stop, door():
        raise OSError(number, os.strerror(number), "/some/place")
    err = capsys.readouterr().err
    assert stop.value.code == 1
    assert err.startswith(f"error: [Errno {number}] {os.strerror(number)}: '/some/place'; ")
    assert ("DRAFTERS_DEBUG" in err) == (number == errno.EINVAL)
    assert err.endswith("; finished work is kept; the same command goes on from there\n")
    assert err.count("\n") == 1


def test_a_reader_that_goes_away_ends_with_one_line():
    text = "from drafters.door import door, say\nwith door():\n    while True:\n        say('x' * 1000)"
    command = [sys.executable, "-c", text]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        process.stdout.read(10)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 1
    assert err.startswith("error: nobody reads the output any more; ")
    assert err.count("\n") == 1


def test_a_working_directory_that_is_gone(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit):
        start(lambda: pytest.fail("it was run"))
    assert "error: the working directory cannot be read (No such file or directory); change" in capsys.readouterr().err


def capture_settings(world, root):
    given = [one for one in train_overrides(world) if one.split(".")[0].split("=")[0] in ("target", "source", "data")]
    sizes = ("cache.tokens_per_shard=150", "cache.batch_tokens=150", f"cache.root={root}", "device=cpu")
    return settings("capture", *given, *sizes)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize("number", SIGNALS[:2], ids=lambda number: number.name)
def test_a_capture_goes_on_with_the_shards_that_are_missing(world, tmp_path, monkeypatch, capsys, number):
    def run(root):
        capture.run(capture_settings(world, root))
        return next(root.glob("tiny-*"))

    whole = files_of(run(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        signalled(patch, "drafters.cache_writer.target_states", at=4, number=number)
        line = ended(lambda: run(tmp_path / "part"), capsys)
    (folder,) = (tmp_path / "part").glob("tiny-*")
    assert line == f"interrupted: finished shards are kept in {folder}; the same command goes on with the others"
    shards = {path.name for path in folder.glob("*.safetensors")}
    assert 0 < len(shards) < sum(name.endswith(".safetensors") for name in whole)
    assert not list(folder.glob("*.tmp*"))
    written = {name: (folder / name).stat().st_mtime_ns for name in shards}
    assert files_of(run(tmp_path / "part")) == whole
    assert {name: (folder / name).stat().st_mtime_ns for name in shards} == written


def test_answers_go_on(world, tmp_path, monkeypatch, capsys):
    def run(out):
        given = [one for one in train_overrides(world) if one.startswith("target.")]
        few = ("max_new_tokens=8", "batch_size=1", f"prompts={world}/maths.jsonl", f"out={out}", "device=cpu")
        regenerate.run(settings("regenerate", *given, *few))
        return out.read_bytes()

    whole, out = run(tmp_path / "whole.jsonl"), tmp_path / "part.jsonl"
    with monkeypatch.context() as patch:
        signalled(patch, "data.engines.local._answer", at=2)
        line = ended(lambda: run(out), capsys)
    assert line == f"interrupted: finished answers are kept in {out}.part; the same command goes on"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part.jsonl.part", "whole.jsonl"]
    assert run(out) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part.jsonl", "whole.jsonl"]


@pytest.mark.parametrize("where", ["write", "_checked"])
def test_an_export_leaves_what_was_there(world, run, tmp_path, monkeypatch, capsys, where):
    def exported(*more):
        given = (f"out={tmp_path}/out", "to=hf", "check=false", *on(world)[:2], "device=cpu")
        export.export(settings("export", f"run={run}", *given, *more))

    exported()
    before = contents(tmp_path)
    module = "export.exporting" if where == "_checked" else "export.to_hf"
    with monkeypatch.context() as patch:
        signalled(patch, f"{module}.{where}")
        line = ended(lambda: exported("overwrite=true", "quant=int8"), capsys)
    assert line == f"interrupted: nothing of {tmp_path}/out was changed; the same command begins anew"
    assert contents(tmp_path) == before
    exported("overwrite=true", "quant=int8")
    assert contents(tmp_path) != before


ON = "the same command with resume=true goes on"


@pytest.mark.parametrize(
    "case",
    [
        ("measure", "drafters.decoding.runner.decode", 4, ON),
        ("calibrate", "drafters.decoding.runner.decode", 2, ON),
        ("profile", "drafters.scheduling.jobs.measure_profile", 1, "nothing of a profile is kept; the same command"),
    ],
    ids=lambda case: case[0],
)
def test_a_measurement_says_what_it_needs_to_go_on(world, run, tmp_path, monkeypatch, capsys, case):
    task, where, at, kept = case
    own = ("task.repeats=1", "task.rows=[1]", "task.max_length=1") if task == "profile" else ()
    given = (f"run={run}", f"task={task}", *on(world), f"out={tmp_path}/out", "num_prompts=2", *own)
    with monkeypatch.context() as patch:
        signalled(patch, where, at=at)
        line = ended(lambda: evaluate.evaluate(settings("evaluate", *given)), capsys)
    assert kept in line
    assert not list(tmp_path.rglob("*.tmp"))
    assert not list(tmp_path.rglob("re*.json"))
    if task != "profile":
        assert (tmp_path / "out" / "progress.jsonl").is_file()
        assert f"finished parts are kept in {tmp_path}/out" in line
        evaluate.evaluate(settings("evaluate", *given, "resume=true"))
        assert "finished parts of the measurement are taken from" in capsys.readouterr().out


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_tasks_of_a_loop_are_cancelled_in_good_order(capsys, number):
    ended_well = []

    async def work():
        try:
            signal.raise_signal(number)
            await asyncio.sleep(60)
        finally:
            ended_well.append(number)

    assert ended(lambda: run_stoppable(work()), capsys).startswith("interrupted: finished work is kept")
    assert ended_well == [number]


def test_pip_is_ended_with_us(tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    text = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            weights._run_pip([sys.executable, "-c", text], tmp_path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_what_pip_said_and_where_it_writes(tmp_path):
    text = "import os, sys; sys.stderr.write(os.environ['TMPDIR']); sys.exit(3)"
    assert weights._run_pip([sys.executable, "-c", text], tmp_path) == (3, str(tmp_path))


def test_folders_of_killed_processes_go_and_those_at_work_stay(tmp_path):
    names = ("dead", "held", "young")
    folders = {name: tmp_path / f".made-{name}" for name in names}
    for folder in folders.values():
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x")
    for name in ("dead", "held"):
        os.utime(folders[name], (0, 0))
    held = os.open(folders["held"], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    weights._clear_left(tmp_path / "made")
    os.close(held)
    assert [name for name in names if folders[name].exists()] == ["held", "young"]
