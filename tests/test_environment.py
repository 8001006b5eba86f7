# What a run was computed with, beside its results: found, kept, compared, and without secrets.

import json
import subprocess

import pytest

from drafters import environment as room
from drafters.environment import (
    REPEATING,
    command_line,
    differences,
    environment,
    read_environments,
    record_environment,
)
from drafters.errors import CheckpointError
from tests.evaluating import evaluated, on


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("engine.api_key=sk-123", "engine.api_key=***"),
        ("+x.hf_token=abc", "+x.hf_token=***"),
        ("data={password: abc, seed: 1}", "data={password: ***, seed: 1}"),
        ("x.secret='a b'", "x.secret=***"),
        ("a=hf_abcdefghijklmnop", "a=***"),
        ("cache.root=s3://me:word@host/folder", "cache.root=s3://***@host/folder"),
        ("url=https://host/x?signature=abc&a=1", "url=https://host/x?***"),
        ("target.mask_token=0", "target.mask_token=0"),
        ("data.max_tokens=200", "data.max_tokens=200"),
        ("report.max_new_tokens=12", "report.max_new_tokens=12"),
        ("drafter.layer_ids=[0,2]", "'drafter.layer_ids=[0,2]'"),
    ],
)
def test_a_command_is_told_without_its_secrets(word, shown):
    assert command_line(["some/train.py", word]) == f"train.py {shown}"


def test_what_the_door_adds_for_hydra_is_no_part_of_the_command():
    assert command_line(["train.py", *REPEATING, "run=a", "name=b"]) == "train.py run=a name=b"


def git(folder, *words):
    own = ("-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", str(folder), *own, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_code_is_a_commit_and_what_was_changed_since(tmp_path):
    checkout = tmp_path.resolve() / "checkout"
    (checkout / "drafters").mkdir(parents=True)
    code = room._code.__wrapped__
    assert code(checkout)["commit"] is None
    (checkout / "drafters" / "a.py").write_text("a = 1\n")
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    clean = code(checkout)
    assert clean["commit"] == git(checkout, "rev-parse", "HEAD")
    assert (clean["dirty"], clean["changed"], clean["diff_sha256"]) == (False, [], None)
    (checkout / "drafters" / "a.py").write_text("a = 2\n")
    changed = code(checkout)
    assert (changed["dirty"], changed["changed"]) == (True, [" M drafters/a.py"])
    (checkout / "b.py").write_text("b = 1\n")
    with_new = code(checkout)
    (checkout / "b.py").write_text("b = 2\n")
    assert len({changed["diff_sha256"], with_new["diff_sha256"], code(checkout)["diff_sha256"], None}) == 4
    # An installed package in somebody's repository is not that repository.
    inside = code(checkout / "drafters")
    assert inside["commit"] is None
    assert "not in a git checkout" in inside["note"]


def test_what_is_found_here():
    found = environment()
    assert found["packages"]["torch"]
    assert any(one.startswith("torch==") for one in found["installed"])
    assert found["threads"] >= 1
    assert found["cpu"]["model"]
    json.dumps(found)


def test_a_drafter_from_elsewhere_is_hashed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_of_elsewhere.py").write_text("class Mine: ...\n")
    from mine_of_elsewhere import Mine

    before = environment(Mine)
    assert before["code"]["drafter"] == "mine_of_elsewhere"
    (tmp_path / "mine_of_elsewhere.py").write_text("class Mine: x = 1\n")
    assert [one.split()[0] for one in differences(before, environment(Mine))] == ["drafter"]
    assert "drafter" not in environment()["code"]


def test_entries_are_appended_and_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "made" / "environment.json"
    assert read_environments(path) == []
    digests = [record_environment(path, {"seed": seed}) for seed in (0, 1)]
    entries = read_environments(path)
    assert [one["seed"] for one in entries] == [0, 1]
    assert [one["sha256"] for one in entries] == digests
    assert digests[0] == digests[1]
    for text in ("{", "[]", '{"commands": [{}]}'):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=r"environment\.json is damaged.*move it away"):
            record_environment(path, {})
        assert path.read_text() == text


def test_what_differs_is_said_shortly():
    now = environment()
    assert differences(now, now) == []
    other = {
        **now,
        "threads": 99,
        "packages": {**now["packages"], "torch": "1.0"},
        "code": {**now["code"], "commit": "0" * 40},
        "gpus": ["H"],
    }
    said = differences(other, now)
    assert f"torch 1.0 -> {now['packages']['torch']}" in said
    assert f"threads 99 -> {now['threads']}" in said
    assert "GPUs H -> none" in said
    assert any(one.startswith("commit 000000000000 -> ") for one in said)
    assert len(said) == 4


def test_an_evaluation_keeps_its_own(world, run, tmp_path):
    evaluated(f"run={run}", *on(world), f"out={tmp_path}")
    assert len(read_environments(tmp_path / "environment.json")) == 1
    assert json.loads((tmp_path / "report.json").read_text())["provenance"]["environment"] == "environment.json"
