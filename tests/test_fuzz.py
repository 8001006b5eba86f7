# Files of our own, damaged in every way that hypothesis finds: a reader gives the same as before, or one error of ours
# that names the file and what to do. Never another exception, never another result.

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.cache import HiddenCache
from drafters.cache_target import find_spec, keep_spec
from drafters.checkpoint import load_drafter, save_drafter
from drafters.decoding.journal import Journal
from drafters.scheduling.calibration import Calibration, identity
from drafters.storage import LocalFolder
from drafters.types import Sampling
from tests.cache_cases import captured
from tests.contract_cases import tiny_world
from tests.fuzzing import Reader, changes, damage, profile
from tests.packed_doubles import wide_world, written
from tests.test_journal import KEY, unit
from tests.tiny import tiny_target

FAST, SLOW = 40, 1500


def weights_of(folder):
    drafter = load_drafter(folder)
    return asdict(drafter.config), {name: t.tolist() for name, t in drafter.state_dict().items()}


def drafter_reader(folder):
    world = tiny_world()
    saved = save_drafter(world.drafter("markov"), folder / "drafter", spec=world.target.spec)
    return Reader(saved, ("config.json", "model.safetensors"), weights_of)


def packed_reader(folder):
    """Values come from a map of the file, so the folder's own checksums decide; to be the same is to be loaded."""
    world = wide_world()
    saved = written(world.drafter("markov"), world.target, folder)
    return Reader(saved, ("config.json", "model.safetensors"), lambda one: asdict(load_drafter(one).config))


def cache_reader(folder):
    made = captured(tiny_target(), folder / "states")

    def read(path):
        from drafters import storage

        storage._verified.clear()
        cache = HiddenCache.open(path)
        samples = [vars(sample) for sample in cache.read(range(len(cache)))]
        plain = [{name: getattr(v, "tolist", lambda v=v: v)() for name, v in one.items()} for one in samples]
        return plain, cache.splits, cache.manifest.key

    return Reader(made.folder.path, ("cache.json", "samples.json", "splits.json", "shard-00000.safetensors"), read)


def spec_reader(folder):
    target = tiny_target()
    made = captured(target, folder / "states")
    place = LocalFolder(folder / "states")
    keep_spec(place, target.spec)

    def read(path):
        found = find_spec(place, made.manifest.key, target.spec)
        if isinstance(found, str):  # in words: the target itself is loaded
            from drafters.errors import DataError

            raise DataError(found)
        return found

    return Reader(folder / "states", ("target_spec.json",), read)


def calibration_reader(folder):
    identity(3, sampling=Sampling(), drafter_sha256="d", target_hash="t").save(folder)
    return Reader(folder, ("calibration.json",), Calibration.load)


def journal_reader(folder):
    with Journal(folder, "f", resume=False) as journal:
        for number in range(3):
            journal.add(KEY._replace(prompts=(number,)), unit(0))

    def read(path):
        with Journal(path, "f", resume=True) as journal:
            units = [journal.get(KEY._replace(prompts=(number,))) for number in range(3)]
        # A last line that is cut is dropped, as after a kill: what is there is right.
        return all(one in (None, unit(0)) for one in units)

    return Reader(folder, ("progress.jsonl",), read)


MAKERS = {
    "drafter": drafter_reader,
    "packed": packed_reader,
    "cache": cache_reader,
    "spec": spec_reader,
    "calibration": calibration_reader,
    "journal": journal_reader,
}


@pytest.fixture(scope="module", params=MAKERS)
def reader(request, tmp_path_factory):
    return MAKERS[request.param](tmp_path_factory.mktemp("fuzz"))


def fuzz(reader, max_examples):
    @profile(max_examples)
    @given(st.data())
    def run(data):
        name = data.draw(st.sampled_from(reader.files))
        change = data.draw(changes(name))
        reader.check(name, lambda path: damage(path, change))

    before = sum(reader.counts.values())
    run()
    assert sum(reader.counts.values()) - before >= 0.9 * max_examples, "hypothesis gave up early"
    assert reader.counts["refused"] > 0


def test_damaged_files_are_refused_or_read_right(reader):
    fuzz(reader, FAST)


@pytest.mark.slow
def test_many_damaged_files_are_refused_or_read_right(reader):
    fuzz(reader, SLOW)
