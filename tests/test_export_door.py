# `python -m export` on a small world: every format writes a folder that is whole, checked, decoded with and described;
# what is wrong is refused before anything is written, and what fails leaves nothing.

import json

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from drafters.checkpoint import load_drafter
from drafters.errors import CheckpointError, ConfigError
from drafters.heads.eagle3 import Eagle3Drafter
from drafters.warm_start import load_warm_start
from export import __main__ as door
from export import exporting, import_draft, to_hf
from tests.door_world import make_run, settings
from tests.evaluating import evaluated
from tests.published_doubles import source_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(world):
    return make_run(world, "exported")


def on(world):
    return ("source=jsonl", f"source.path={world}/maths.jsonl", "device=cpu", "max_new_tokens=14", "split=null")


def exported(run, world, *overrides):
    door.export(settings("export", f"run={run}", *on(world), *overrides))


FORMATS = [
    ("hf", "none"),
    ("hf", "int8"),
    ("speculators", "fp8"),
    ("gguf", "none"),
    ("gguf", "int8"),
    ("packed", "int8"),
]


@pytest.mark.parametrize(("to", "quant"), FORMATS)
def test_an_export_is_whole_checked_and_described(world, run, to, quant, capsys):
    exported(run, world, f"to={to}", f"quant={quant}", "license=mit")
    folder = run / "export" / (to if quant == "none" else f"{to}-{quant}")
    report = json.loads((folder / "export.json").read_text())
    assert (report["to"], report["quant"]) == (to, quant)
    assert report["num_tensors"] > 10
    (kept,) = report["kept"]
    assert kept["before"] >= 1
    assert kept["after"] >= 1
    assert set(report["costs"]) == {"before", "after"}
    assert all(cost["num_bytes"] > 0 and cost["token_ms"] > 0 for cost in report["costs"].values())
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "mit"
    assert "speculative-decoding" in card.data.tags
    assert "## Accepted length, before and after" in card.text
    assert "## How to serve it" in card.text
    assert not list(folder.parent.glob("*.tmp"))
    assert f"Written: {folder}" in capsys.readouterr().out


def test_without_a_check_nothing_is_decoded(world, run, monkeypatch):
    monkeypatch.setattr("drafters.door.load_target", None)
    exported(run, world, "check=false", f"out={world}/unchecked")
    report = json.loads((world / "unchecked" / "export.json").read_text())
    assert (report["kept"], report["costs"]) == ([], {})
    assert report["worst_error"] < 0.01


WRONG = [
    (("run=null",), r"^run: got null; accepted: the folder of a run"),
    (("run=nowhere/at/all",), "^run: no folder nowhere/at/all"),
    (("quant=int3",), r"^quant: got 'int3'; accepted: none, int8, int4, fp8"),
    (("to=packed",), r"^quant: got 'none' with to=packed; accepted: int8, int4"),
    (("to=gguf", "quant=fp8"), "fp8"),
    (("to.dtype=f8",), r"^to.dtype: got 'f8'; accepted: bf16, f16, f32"),
    (("+to.much=1",), r"^to\.much: unknown setting"),
    (("to=mtp",), "to=mtp: got a drafter of the family"),
    (("num_prompts=0",), "num_prompts: got 0"),
    (("out=''",), r"^out: got ''"),
]


@pytest.mark.parametrize(("overrides", "message"), WRONG, ids=[" ".join(overrides) for overrides, _ in WRONG])
def test_what_cannot_be_is_refused_and_nothing_is_written(world, run, overrides, message):
    before = set((run / "export").rglob("*"))
    with pytest.raises((ConfigError, CheckpointError), match=message):
        exported(run, world, *overrides)
    assert set((run / "export").rglob("*")) == before


def test_an_export_that_is_there_stays_unless_it_is_to_give_way(world, run):
    out = world / "twice"
    exported(run, world, "check=false", f"out={out}")
    first = (out / "config.json").stat().st_mtime_ns
    with pytest.raises(ConfigError, match=r"^out: .*twice is there already; choose another folder, or overwrite=true"):
        exported(run, world, "check=false", f"out={out}")
    assert (out / "config.json").stat().st_mtime_ns == first
    exported(run, world, "check=false", f"out={out}", "overwrite=true", "quant=int8")
    assert json.loads((out / "export.json").read_text())["quant"] == "int8"


def test_only_an_export_gives_way(world, run):
    out = world / "thesis"
    out.mkdir()
    exported(run, world, "check=false", f"out={out}", "overwrite=true")  # nothing is lost with an empty folder
    (out / "export.json").unlink()
    for place in (out, run, run / "drafter", world / "maths.jsonl"):
        before = sorted(place.rglob("*"))
        with pytest.raises(ConfigError, match=rf"^out: {place} is no export .* overwrite=true does not take its place"):
            exported(run, world, "check=false", f"out={place}", "overwrite=true")
        assert place.exists()
        assert sorted(place.rglob("*")) == before
    with pytest.raises(ConfigError, match=r"^out: got '/'; accepted: a folder of its own"):
        exported(run, world, "check=false", "out=/", "overwrite=true")


def test_folders_beside_an_export_stay(world, run):
    for name in ("beside.tmp", "neighbour.old"):
        (world / name).mkdir()
        (world / name / "notes.txt").write_text("mine")
    exported(run, world, "check=false", f"out={world}/beside")
    with pytest.raises(ConfigError, match=r"^out: .*neighbour.old is there, and would be in the way"):
        exported(run, world, "check=false", f"out={world}/neighbour")
    assert all((world / name / "notes.txt").is_file() for name in ("beside.tmp", "neighbour.old"))


def test_a_crash_between_the_old_and_the_new_keeps_the_old(world, run):
    out = world / "crashed"
    exported(run, world, "check=false", f"out={out}")
    out.rename(world / "crashed.old")
    with pytest.raises(ConfigError, match=r"^out: .*crashed is there already"):
        exported(run, world, "check=false", f"out={out}")
    assert (out / "export.json").is_file()


def test_a_link_to_an_export_stays_a_link(world, run):
    exported(run, world, "check=false", f"out={world}/linked")
    (world / "link").symlink_to(world / "linked")
    exported(run, world, "check=false", f"out={world}/link", "overwrite=true", "quant=int8")
    assert (world / "link").is_symlink()
    assert json.loads((world / "linked" / "export.json").read_text())["quant"] == "int8"


def test_a_file_that_is_not_whole_or_not_right_gets_no_name(world, run, monkeypatch):
    real = to_hf.published_tensors

    def lacking(*args, **kwargs):
        tensors = real(*args, **kwargs)
        return {name: tensor for name, tensor in tensors.items() if name != "layers.0.self_attn.q_proj.weight"}

    def off(*args, **kwargs):
        tensors = real(*args, **kwargs)
        return {**tensors, "norm.weight": tensors["norm.weight"] + 1}

    for damage, message in ((lacking, "q_proj.weight is missing"), (off, "norm.weight came back 1 off")):
        monkeypatch.setattr(to_hf, "published_tensors", damage)
        with pytest.raises(CheckpointError, match=message):
            exported(run, world, "check=false", f"out={world}/damaged")
        assert not list(world.glob("damaged*"))


def test_a_full_disk_leaves_nothing(world, run, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(to_hf, "save_tensors", full)
    with pytest.raises(CheckpointError, match="no space left on the disk; what was saved"):
        exported(run, world, "check=false", f"out={world}/full")
    assert not list(world.glob("full*"))


def test_a_packed_folder_drafts_as_any_other(world, run):
    exported(run, world, "to=packed", "quant=int8", "check=false", f"out={world}/packed")
    drafter = load_drafter(world / "packed" / "drafter")
    assert drafter.block_size == load_drafter(run / "drafter").block_size
    evaluated(f"run={world}/packed", *on(world)[:4], "profile_rounds=2", f"out={world}/measured-packed")
    assert (world / "measured-packed" / "report.json").is_file()
    with pytest.raises(CheckpointError, match=r"^run: .* is packed, .*; export the run that it was made of"):
        exported(world / "packed", world, "check=false", f"out={world}/again")
    with pytest.raises(
        ConfigError, match=r"^warm_start: .*drafter is packed: .* accepted: the run that it was exported"
    ):
        load_warm_start(str(world / "packed"), type(drafter), drafter.config, drafter.spec)


def test_a_target_with_other_weights_in_its_place_is_refused(world, run):
    place, away = world / "target" / "model.safetensors", world / "away.safetensors"
    place.rename(away)
    save_file({name: tensor + 1 for name, tensor in load_file(away).items()}, place)
    try:
        with pytest.raises(CheckpointError, match=r"trained for target 'tiny', weights .* but in .*target lie weights"):
            exported(run, world, "check=false", f"out={world}/moved")
    finally:
        away.rename(place)
    assert not (world / "moved").exists()


PUSHED = []


class Hub:
    """Takes what is pushed."""

    def create_repo(self, repo, *, private, exist_ok):
        PUSHED.append(("repo", repo, private))

    def upload_folder(self, *, repo_id, folder_path, commit_message, ignore_patterns):
        assert ignore_patterns == [".hydra/*"]
        PUSHED.append(("files", repo_id, sorted(path.name for path in folder_path.iterdir())))
        return type("Info", (), {"commit_url": f"https://hub/{repo_id}/commit/1"})


def test_a_push_uploads_the_folder(world, run, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    exported(run, world, "check=false", f"out={world}/pushed", "push=org/name", "private=true")
    repo, files = PUSHED
    assert repo == ("repo", "org/name", True)
    assert {"README.md", "config.json", "model.safetensors", "export.json"} <= set(files[2])
    assert "Pushed: https://hub/org/name/commit/1" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^push: got 'name'; accepted: org/name"):
        exporting.push_folder(world / "pushed", "name", private=False)


def test_a_hub_that_does_not_take_it_leaves_the_folder(world, run, monkeypatch):
    def refused(self, repo, **kwargs):
        raise OSError("401 Unauthorized")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "create_repo", refused)
    with pytest.raises(CheckpointError, match=r"^push: org/name: 401 Unauthorized; the export stays in .*kept"):
        exported(run, world, "check=false", f"out={world}/kept", "push=org/name")
    assert (world / "kept" / "model.safetensors").is_file()


def test_what_was_exported_comes_back_as_a_run(world, run, capsys):
    exported(run, world, "check=false", "to.dtype=f32", f"out={world}/published")
    target = tuple(f"{name}={value}" for name, value in targets(world).items())
    given = (f"draft={world}/published", f"outputs={world}/outputs", "name=back", "device=cpu", *target)
    import_draft.bring_in(settings("import", *given))
    mine, back = (load_drafter(world / "outputs" / name / "drafter") for name in (run.name, "back"))
    tensors = mine.state_dict()
    assert tensors.keys() == back.state_dict().keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in back.state_dict().items())
    evaluated(f"run={world}/outputs/back", *on(world)[:4], "profile_rounds=2", f"out={world}/measured")
    assert (world / "measured" / "report.json").is_file()
    assert "evaluate.py run=" in capsys.readouterr().out


def test_an_eagle3_that_says_no_block_size_comes_in(world, run, capsys):
    spec = load_drafter(run / "drafter").spec
    drafter = Eagle3Drafter(Eagle3Drafter.Config(layer_ids=(0, 1)), spec)
    folder = world / "eagle3"
    folder.mkdir()
    to_hf.write(source_of(drafter, target_folder=world / "target"), "none", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "block_size": None}))
    target = tuple(f"{name}={value}" for name, value in targets(world).items())
    import_draft.bring_in(settings("import", f"draft={folder}", f"outputs={world}/outputs", "device=cpu", *target))
    assert "eagle3: 13 tensors, 7 drafts a round" in capsys.readouterr().out


def targets(world):
    return {
        "target.weights": f"{world}/target",
        "target.name": "tiny",
        "target.sha256": "null",
        "target.mask_token": 0,
        "target.dtype": "float32",
    }


def test_a_draft_that_is_none_is_refused(world):
    target = tuple(f"{name}={value}" for name, value in targets(world).items())
    for draft, message in (
        ("null", r"^draft: got None; accepted: the folder"),
        (f"{world}/nowhere", "^draft: '.*nowhere' is not an existing folder"),
        (f"{world}/target given=5", r"^given: got 5; accepted: settings by name, such as \+given.block_size=7"),
        (f"{world}/target", "are of no draft that is known; accepted: DFlash"),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=message):
            import_draft.bring_in(settings("import", *f"draft={draft}".split(), f"outputs={world}/outputs", *target))
