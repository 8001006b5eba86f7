# Doors configure logging for the whole process; a test that reads the log must not depend on which test opened one.

import logging

import pytest


@pytest.fixture(autouse=True)
def notes_reach_the_log():
    for name in [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "drafters"]:
        logging.getLogger(name).disabled = False
