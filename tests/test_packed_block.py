# The block's file: what lies where, what comes back, and every way it can be damaged.

import json

import pytest
import torch
from safetensors import safe_open

from drafters.errors import CheckpointError
from drafters.packed.block import ALIGNMENT, Block, Part, block_size, save_block
from drafters.packed.nibbles import tile, untile

GAIN = Part(names=("norm.weight",), rows=(5,), shape=(5,), form="float32")
IDS = Part(names=("vocab.d2t",), rows=(3,), shape=(3,), form="int64")
JOINED = Part(names=("q", "k"), rows=(4, 2), shape=(6, 10), form="int8", symmetric=False, quantized_inputs=True)
TABLE = Part(names=("w1",), rows=(3,), shape=(3, 2), form="int8")
FOURS = Part(names=("up",), rows=(16,), shape=(16, 64), form="int4", group_size=32)


def arrays():
    generator = torch.Generator().manual_seed(0)

    def whole(low, high, shape, dtype):
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    return {
        GAIN: {"values": torch.randn(5, generator=generator)},
        IDS: {"values": torch.tensor([3, 7, 9])},
        JOINED: {
            "values": whole(-128, 128, (6, 10), torch.int8),
            "scale": torch.rand(6, generator=generator),
            "zero": whole(-9, 9, (6,), torch.int8),
        },
        TABLE: {"values": whole(-128, 128, (3, 2), torch.int8), "scale": torch.rand(3, generator=generator).bfloat16()},
        FOURS: {
            "values": whole(0, 256, (16, 32), torch.uint8),
            "scale_zero": torch.randn(2, 16, 2, generator=generator).bfloat16(),
        },
    }


@pytest.fixture
def path(tmp_path):
    save_block(arrays(), tmp_path / "block.safetensors")
    return tmp_path / "block.safetensors"


def header_of(path):
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), 8 + length


def rewrite(path, change):
    """The same block under a header that `change` was made to; the index is a text inside it."""
    header, start = header_of(path)
    index = json.loads(header["__metadata__"]["drafters.packed"])
    change(header, index)
    header["__metadata__"]["drafters.packed"] = json.dumps(index)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + path.read_bytes()[start:])


def test_every_array_comes_back_to_the_bit(path):
    block = Block.open(path)
    block.check()
    assert block.parts == (GAIN, IDS, JOINED, TABLE, FOURS)
    for part, given in arrays().items():
        found = block.arrays(part)
        assert found.keys() == given.keys()
        for name in given:
            assert found[name].dtype == given[name].dtype
            assert torch.equal(found[name], given[name]), (part, name)


def test_parts_are_aligned_views_of_one_map(path):
    block = Block.open(path)
    first = block.data.data_ptr()
    for part in block.parts:
        for array in block.arrays(part).values():
            assert array.data_ptr() % ALIGNMENT == 0
            assert first <= array.data_ptr() < first + len(block.data)
            assert array.untyped_storage().data_ptr() == block.data.untyped_storage().data_ptr()


def test_writing_into_a_block_leaves_its_file(path):
    before = path.read_bytes()
    Block.open(path).arrays(GAIN)["values"].zero_()
    assert path.read_bytes() == before
    Block.open(path).check()


def test_the_file_is_what_safetensors_calls_one(path):
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["block"]
        assert torch.equal(file.get_tensor("block"), Block.open(path).data)
        assert file.metadata()["format"] == "pt"


def test_size_and_padding_are_what_lies_in_the_file(path):
    size, padding = block_size(list(arrays()))
    stored = sum(array.nbytes for one in arrays().values() for array in one.values())
    assert size == len(Block.open(path).data) == stored + padding
    assert size % ALIGNMENT == 0
    assert 0 < padding < ALIGNMENT * 9
    assert block_size([]) == (0, 0)


@pytest.mark.parametrize("name", ["norm.weight", "vocab.d2t", "q, k", "w1", "up"])
def test_a_flipped_byte_is_found_in_its_tensor(path, name):
    block = Block.open(path)
    part = next(part for part in block.parts if part.label == name)
    array = list(block.arrays(part).values())[-1]
    at = array.data_ptr() - block.data.data_ptr() + array.nbytes - 1
    raw = bytearray(path.read_bytes())
    raw[header_of(path)[1] + at] ^= 4
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"{name}: its bytes are damaged"):
        Block.open(path).check()


@pytest.mark.parametrize("lost", [1, 200])
def test_a_file_that_is_cut_short_is_refused(path, lost):
    path.write_bytes(path.read_bytes()[:-lost])
    with pytest.raises(CheckpointError, match="cut short"):
        Block.open(path)


def test_a_file_that_is_too_long_is_refused(path):
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match=r"index says .* damaged"):
        Block.open(path)


@pytest.mark.parametrize("key", ["at", "crc32", "shape", "names"])
def test_an_index_that_lacks_a_key_is_refused(path, key):
    rewrite(path, lambda header, index: index["parts"][1].pop(key))
    with pytest.raises(CheckpointError, match=f"its index is damaged .*{key}.* export the drafter again"):
        Block.open(path)


@pytest.mark.parametrize("text", [b"", b"\x05\0\0\0\0\0\0\0hello", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_header_that_is_none_is_refused(path, text):
    path.write_bytes(text)
    with pytest.raises(CheckpointError, match="header is damaged"):
        Block.open(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        Block.open(tmp_path / "none")


def shifted(header, index):
    index["parts"][2]["at"]["scale"][0] += 64


def renamed(header, index):
    index["parts"][1]["names"] = ["q"]


def widened(header, index):
    index["parts"][2]["shape"] = [6, 11]


def fewer_rows(header, index):
    index["parts"][2]["rows"] = [4, 1]


def dropped(header, index):
    del index["parts"][4]


def formless(header, index):
    index["parts"][0]["form"] = "int3"


def ungrouped(header, index):
    index["parts"][4]["group_size"] = 48


def later(header, index):
    index["schema"] = 2


def nameless(header, index):
    del header["block"]


def typed(header, index):
    header["block"]["dtype"] = "I8"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shifted, "q, k: its index says"),
        (renamed, "q is in its index twice"),
        (widened, "q, k: its index says"),
        (fewer_rows, "index is damaged .*rows"),
        (dropped, "its parts need"),
        (formless, "index is damaged .*int3"),
        (ungrouped, "index is damaged .*48"),
        (later, "schema of its index is 2"),
        (nameless, "index is damaged .*block"),
        (typed, "no tensor of bytes"),
    ],
)
def test_an_index_that_cannot_be_is_refused(path, change, said):
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=said):
        Block.open(path)


@pytest.mark.parametrize("rows", [16, 48, 64, 80, 192])
@pytest.mark.parametrize("width", [2, 34])
def test_tiles_hold_every_value_where_the_description_says(rows, width):
    values = torch.randint(-8, 8, (rows, width), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    packed = tile(values)
    assert (packed.shape, packed.dtype) == ((rows, width // 2), torch.uint8)
    assert torch.equal(untile(packed), values)
    flat = packed.flatten()
    for n in range(rows):
        first, high = n - n % 64, min(64, rows - (n - n % 64))
        # A byte: half of the tile's rows side by side, column after column.
        where, upper = (n - first) % 32, (n - first) // 32
        if high < 64:
            where, upper = (n - first) // 2, (n - first) % 2
        for k in range(width):
            byte = int(flat[first * width // 2 + k * high // 2 + where])
            assert (byte >> 4 if upper else byte & 15) - 8 == int(values[n, k]), (n, k)
