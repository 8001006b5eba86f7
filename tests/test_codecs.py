# Codecs: rows alone, bytes as promised, errors within what the spelling can hold, values against naive twins.

import pytest
import torch

from drafters import codecs
from drafters.codecs import CODECS, NF4, find_codec
from drafters.errors import ConfigError

# Largest error of a number, in shares of the largest of its row (fp8: of itself) or group.
CLOSEST = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.5 / 127 + 2**-8, "int4": 0.153 + 2**-8}


def rows(width: int = 38, *, seed: int = 0):
    """Rows of very different sizes, one of zeros, with a few numbers far above the others."""
    generator = torch.Generator().manual_seed(seed)
    rows_ND = torch.randn(40, width, generator=generator) * torch.logspace(-6, 5, 40)[:, None]
    rows_ND[:, 3] *= 50
    rows_ND[7] = 0
    return rows_ND


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("width", [2, 16, 38, 64, 130])
def test_rows_are_coded_one_by_one(name, width):
    codec, rows_ND = CODECS[name], rows(max(4, width))[:, :width]
    parts = codec.encode(rows_ND)
    assert set(parts) == set(codec.parts)
    assert all(part.is_contiguous() and len(part) == len(rows_ND) for part in parts.values())
    assert sum(part[0].nbytes for part in parts.values()) == codec.row_bytes(width)
    cut = codec.decode({key: part[2:9] for key, part in parts.items()})
    assert torch.equal(cut, codec.decode(codec.encode(rows_ND[2:9])))
    assert cut.shape == (7, width)
    assert cut.dtype in (torch.bfloat16, torch.float32)
    assert torch.equal(codec.decode(codec.encode(rows_ND[:0])), cut[:0])


@pytest.mark.parametrize("name", CLOSEST)
def test_errors_are_within_what_can_be_spelled(name):
    codec, rows_ND = CODECS[name], rows()
    size = getattr(codec, "group", rows_ND.shape[1])
    error_ND = (codec.decode(codec.encode(rows_ND)).float() - rows_ND).abs()
    for start in range(0, rows_ND.shape[1], size):
        largest_N1 = rows_ND[:, start : start + size].abs().amax(1, keepdim=True)
        # The least scale, and one more rounding to bfloat16.
        assert (error_ND[:, start : start + size] <= (CLOSEST[name] + 2**-8) * largest_N1 + 1e-7).all()


def test_fp8_errors_are_in_proportion_to_each_number():
    rows_ND = rows()
    back_ND = CODECS["fp8"].decode(CODECS["fp8"].encode(rows_ND)).float()
    largest_N1 = rows_ND.abs().amax(1, keepdim=True)
    assert ((back_ND - rows_ND).abs() <= (2**-4 + 2**-7) * rows_ND.abs() + 2**-9 / 448 * largest_N1 + 1e-9).all()


def number_of_fp8(code: int) -> float:
    """By the format's definition; the codes of NaN, which are never written, go on as 480."""
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    return (-1) ** sign * (2.0 ** (exponent - 7) * (1 + fraction / 8) if exponent else 2.0**-6 * fraction / 8)


# From the least scale to that of a row with the largest bfloat16.
@pytest.mark.parametrize("scale", [1e-7, 3e-5, 1.0, 700.0, torch.finfo(torch.bfloat16).max / 448])
def test_fp8_is_the_number_of_each_code_times_the_scale(scale):
    numbers = torch.tensor([[number_of_fp8(code) for code in range(256)]])
    data = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)[None]
    finite = data.float().isfinite()
    assert torch.equal(numbers[finite], data.float()[finite])
    found = CODECS["fp8"].decode({"data": data, "scale": torch.full((1, 1), scale)})
    assert torch.equal(found, (numbers * torch.tensor(scale)).bfloat16())
    assert found[finite].isfinite().all()
    assert found[0, 128].signbit()


@pytest.mark.parametrize("width", [1, 6, 63, 64, 65, 130])
def test_int8_is_each_number_times_the_scale_of_its_group(width):
    generator = torch.Generator().manual_seed(width)
    data = torch.randint(-127, 128, (5, width), generator=generator, dtype=torch.int8)
    scale = torch.logspace(-7, 35, 5 * -(-width // 64)).view(5, -1).bfloat16()
    found = CODECS["int8"].decode({"data": data, "scale": scale})
    for row in range(5):
        for place in range(width):
            naive = (data[row, place].float() * scale[row, place // 64].float()).bfloat16()
            assert found[row, place] == naive


# Rows of odd numbers of bytes, whole words of two, and a last group that is not full.
@pytest.mark.parametrize("width", [2, 4, 6, 16, 18, 20, 38, 64])
@pytest.mark.parametrize("offset", [0, 1])
def test_int4_is_the_level_of_each_code_times_the_scale_of_its_group(width, offset):
    generator = torch.Generator().manual_seed(width)
    stored = torch.randint(256, (offset + 7 * width // 2,), generator=generator, dtype=torch.uint8)
    data = stored[offset:].view(7, width // 2)  # a mapped file may hold it at an odd place
    scale = torch.logspace(-7, 38, 7 * -(-width // 16)).view(7, -1).bfloat16()
    found = CODECS["int4"].decode({"data": data, "scale": scale})
    levels = torch.tensor(NF4).bfloat16()
    for row in range(7):
        for place in range(width):
            code = int(data[row, place // 2]) >> 4 * (place % 2) & 15
            naive = (levels[code].float() * scale[row, place // 16].float()).bfloat16()
            assert found[row, place] == naive


def test_int4_knows_every_pair_of_bytes():
    data = torch.arange(65536).to(torch.uint16).view(torch.uint8).view(-1, 2)
    codes = torch.stack([data[:, 0] & 15, data[:, 0] >> 4, data[:, 1] & 15, data[:, 1] >> 4], dim=1)
    scale = torch.ones(len(data), 1, dtype=torch.bfloat16)
    found = CODECS["int4"].decode({"data": data, "scale": scale})
    assert torch.equal(found, torch.tensor(NF4).bfloat16()[codes.int()])


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("width", [38, 128])
def test_decodes_into_a_layer_of_a_stack(name, width):
    codec = CODECS[name]
    parts = codec.encode(rows(width))
    alone = codec.decode(parts)
    assert alone.dtype == codec.dtype
    stack = torch.full((40, 3, width), torch.nan, dtype=codec.dtype)
    codec.decode(parts, stack[:, 1])
    assert torch.equal(stack[:, 1], alone)
    assert stack[:, ::2].isnan().all()


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("rows_each", [1, 7, 8])
def test_blocks_do_not_change_the_numbers(monkeypatch, name, rows_each):
    parts = CODECS[name].encode(rows(130))
    whole, seen = CODECS[name].decode(parts), []
    monkeypatch.setattr(codecs, "BLOCK", rows_each * 130)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    decode = getattr(codecs, kernel := f"_{name.replace('fp', 'float')}")
    monkeypatch.setattr(codecs, kernel, lambda *block: seen.append(len(block[2])) or decode(*block))
    assert torch.equal(CODECS[name].decode(parts), whole)
    assert seen[:2] == [rows_each, rows_each]
    assert sum(seen) == 40


def test_int8_is_the_nearest_multiple_of_the_group_s_scale():
    rows_ND = rows(130)
    parts = CODECS["int8"].encode(rows_ND)
    for row, numbers in enumerate(rows_ND):
        for group in range(3):
            part = numbers[64 * group : 64 * (group + 1)]
            scale = max(float(part.abs().max()) / 127, 1e-7)
            assert float(parts["scale"][row, group]) == pytest.approx(scale, rel=2**-8)
            wanted = (part / parts["scale"][row, group].float()).round().clamp(-127, 127)
            assert parts["data"][row, 64 * group : 64 * (group + 1)].tolist() == wanted.tolist()


def test_int4_is_the_nearest_level():
    rows_ND = rows()
    parts, levels = CODECS["int4"].encode(rows_ND), torch.tensor(NF4)
    back_ND = CODECS["int4"].decode(parts).float()
    scale_ND = parts["scale"].float().repeat_interleave(16, 1)[:, : rows_ND.shape[1]]
    nearest_ND = (rows_ND[..., None] / scale_ND[..., None] - levels).abs().amin(-1) * scale_ND
    # Between two levels the finer grid decides, a thousandth of the scale off at most; then bfloat16 rounds.
    assert ((back_ND - rows_ND).abs() <= nearest_ND + 0.002 * scale_ND + 2**-8 * back_ND.abs() + 1e-9).all()
    assert len(back_ND[0].unique()) > 8


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_what_is_coded_again_stays(name):
    codec = CODECS[name]
    once = codec.decode(codec.encode(rows()))
    assert (codec.decode(codec.encode(once)).float() - once.float()).abs().max() <= 2**-6 * once.float().abs().max()


def test_an_unknown_codec_is_refused():
    with pytest.raises(ConfigError, match=r"cache.codec: got 'int3'; accepted: bf16, fp32, fp8, int8, int4"):
        find_codec("int3")
