# Fixtures that several files share: a small world with a finished run in it, and one thread, so that two runs are alike
# to the bit. Doors configure logging for the whole process; a test that reads the log must not depend on which opened.

import logging

import pytest


@pytest.fixture(autouse=True)
def notes_reach_the_log():
    for name in [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "drafters"]:
        logging.getLogger(name).disabled = False


@pytest.fixture(scope="module")
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_cublas(monkeypatch):
    """Without a setting of cuBLAS in the environment, and so left behind."""
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a target, conversations and prompts."""
    from tests.door_world import make_world

    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def first(world, one_thread):
    """The folder of a finished run."""
    import train
    from tests.door_world import train_settings

    train.train(train_settings(world))
    return world / "outputs" / "first"


@pytest.fixture(scope="module")
def made(target, tmp_path_factory):
    """A finished cache of the file's own target in a local folder, for reading only."""
    from tests.cache_cases import captured

    return captured(target, tmp_path_factory.mktemp("cache") / "made")


@pytest.fixture
def stub(monkeypatch):
    """A server of chat completions that does as it is told, asked again without long pauses."""
    import openai._base_client

    from tests.openai_doubles import serving

    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def run(world):
    """The folder of a run that was not trained, with prompts to evaluate it on."""
    from tests.evaluating import evaluation_run

    return evaluation_run(world)


@pytest.fixture
def measured(run, monkeypatch):
    """Runs evaluate.py up to the measurement; gives what would be measured and written."""
    from tests.evaluating import up_to_the_measurement

    return up_to_the_measurement(run, monkeypatch)
