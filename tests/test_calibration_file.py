# A calibration.json whose values have wrong types is refused by name, never with a traceback where it is used.

import json

import pytest

from drafters.errors import CheckpointError
from drafters.scheduling.calibration import Calibration, identity
from drafters.types import Sampling


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"drafter_sha256": None}, "drafter_sha256 is None, accepted: a text"),
        ({"target_hash": 5}, "target_hash is 5, accepted: a text"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature is 'hot', accepted: a finite number"),
        ({"sampling": {"top_k": None}}, "sampling.top_k is None, accepted: a finite number"),
        ({"sampling": {"top_p": float("nan")}}, "sampling.top_p is nan, accepted: a finite number"),
        ({"sampling": {"min_p": True}}, "sampling.min_p is True, accepted: a finite number"),
        ({"sampling": {"top_k": 10**400}}, "damaged: OverflowError"),
        ({"biases": [10**400]}, "damaged: OverflowError"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_by_name(tmp_path, change, said):
    path = identity(1, sampling=Sampling(), drafter_sha256="d", target_hash="t").save(tmp_path)
    values = json.loads(path.read_text()) | change
    del values["checksum"]
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=said) as caught:
        Calibration.load(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).count("task=calibrate") == 1


def test_a_file_nested_without_end_is_refused(tmp_path):
    (tmp_path / "calibration.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read: it is nested too deep"):
        Calibration.load(tmp_path)
