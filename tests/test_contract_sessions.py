# Decoding computes what training computed, for every trained drafter of conf/drafter.

import pytest

from tests.contract_cases import TRAINED, node_of, shaken, tiny_world
from tests.session_cases import CE_ALONE, check_session

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("reduced", [True, False])
def test_sessions_compute_what_training_computes(name, reduced):
    world = tiny_world()
    size = {} if reduced or "draft_vocab_size" not in node_of(name) else {"draft_vocab_size": None}
    drafter = shaken(world.drafter(name, num_anchors=1, loss=CE_ALONE, **size))
    check_session(drafter, world)
