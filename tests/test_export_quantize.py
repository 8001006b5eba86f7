# Quantization against a naive twin that counts in plain Python: values, scales and the search for them; what rounding
# may cost; and rows, dtypes and weights that are out of the ordinary.

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from drafters.errors import CheckpointError, ConfigError
from export import quantize as module
from export.quantize import DTYPES, SCHEMES, Scheme, dequantize, error_bound, quantize, scheme_of

INTS = [
    Scheme(bits=bits, symmetric=symmetric, group_size=group, search=search)
    for bits, symmetric, group, search in product((4, 8), (True, False), (None, 32), (True, False))
]
FLOATS = [Scheme(kind="fp8", search=search) for search in (True, False)]
# Every finite number of e4m3, by its definition: 7 in 2^-9 from 0, then 8 between two powers of 2, up to 448.
E4M3 = [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
MANTISSA_BITS = {"bf16": 8, "f16": 11, "f32": 24}


def label(scheme):
    size = scheme.group_size or "row"
    return f"{scheme.kind}{scheme.bits}-{'sym' if scheme.symmetric else 'asym'}-{size}{'-search' * scheme.search}"


def random_weight(rows=3, width=64, *, seed=0):
    """Rows of different sizes, one of them off centre, with a few large weights."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=generator) * torch.logspace(-2, 0, rows)[:, None]
    weight[-1] += 0.4
    weight[0, 5], weight[1, -1] = weight[0, 5] * 4, weight[1, -1] * 6
    return weight


def naive_scale(low, high, scheme):
    if scheme.kind == "fp8":
        scale = max(high, -low) / 448
    elif scheme.symmetric:
        scale = max(high, -low) / (2 ** (scheme.bits - 1) - 0.5)
    else:
        low, high = min(low, 0.0), max(high, 0.0)
        scale = (high - low) / (2**scheme.bits - 1)
    mantissa, exponent = math.frexp(scale)
    bits = MANTISSA_BITS[scheme.scale_dtype]
    scale = math.ldexp(math.ceil(mantissa * 2**bits), exponent - bits)
    smallest = -(2 ** (scheme.bits - 1))
    zero = 0 if scheme.symmetric else min(max(round(smallest - low / scale), smallest), -smallest - 1)
    return scale, zero


def naive_value(weight, scale, zero, scheme):
    if scheme.kind == "fp8":
        nearest = min(range(len(E4M3)), key=lambda i: (abs(E4M3[i] - abs(weight) / scale), i % 2))
        return math.copysign(E4M3[nearest], weight)
    end = 2 ** (scheme.bits - 1)
    return min(max(round(weight / scale) + zero, -end), end - 1)


def naive_quantize(weight, scheme, moments=None):
    """Scale by scale, weight by weight."""
    size = scheme.group_size or weight.shape[1]
    values, scales, zeros = [], [], []
    for row in weight.tolist():
        for start in range(0, len(row), size):
            group = row[start : start + size]
            weights = [1.0] * size if moments is None else moments.tolist()[start : start + size]
            found = []
            for factor in module._FACTORS if scheme.search else (1.0,):
                scale, zero = naive_scale(min(group) * factor, max(group) * factor, scheme)
                codes = [naive_value(w, scale, zero, scheme) for w in group]
                errors = [(w - (c - zero) * scale) ** 2 for w, c in zip(group, codes, strict=True)]
                found.append((sum(m * e for m, e in zip(weights, errors, strict=True)), scale, zero, codes))
            _, scale, zero, codes = min(found, key=lambda one: one[0])
            values, scales, zeros = values + codes, [*scales, scale], [*zeros, zero]
    groups = (len(weight), -1)
    return torch.tensor(values).view(groups), torch.tensor(scales).view(groups), torch.tensor(zeros).view(groups)


@pytest.mark.parametrize("scheme", INTS + FLOATS, ids=label)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_equals_a_naive_twin(scheme, dtype):
    scheme = replace(scheme, scale_dtype=dtype)
    weight = random_weight()
    found = quantize(weight, scheme, name="w")
    values, scale, zero = naive_quantize(weight, scheme)
    if dtype == "f32":  # the twin counts in float64
        torch.testing.assert_close(found.scale, scale, rtol=1e-6, atol=0)
    else:
        assert torch.equal(found.scale, scale)
    assert torch.equal(found.values.float(), values.float())
    assert (found.zero_point is None) == scheme.symmetric
    if not scheme.symmetric:
        assert found.zero_point.dtype == torch.int8
        assert torch.equal(found.zero_point.float(), zero.float())
        assert found.zero_point.unique().numel() > 1
    assert found.values.dtype == (torch.float8_e4m3fn if scheme.kind == "fp8" else torch.int8)
    groups = scheme.group_size or weight.shape[1]
    expected = torch.stack(
        [
            (values[row, column] - zero[row, column // groups]) * found.scale[row, column // groups]
            for row in range(weight.shape[0])
            for column in range(weight.shape[1])
        ]
    ).view_as(weight)
    assert torch.equal(dequantize(found), expected.float())


@pytest.mark.parametrize("scheme", [INTS[0], INTS[2], Scheme(bits=4, symmetric=False), FLOATS[0]], ids=label)
def test_a_search_can_weigh_by_the_inputs(scheme):
    weight = random_weight()
    moments = torch.logspace(-3, 1, 64)
    found = quantize(weight, scheme, name="w", input_moments=moments)
    values, scale, _ = naive_quantize(weight, scheme, moments)
    assert torch.equal(found.scale, scale)
    assert torch.equal(found.values.float(), values.float())
    plain = quantize(weight, scheme, name="w")
    weighted = [float(((weight - dequantize(q)) ** 2 * moments).sum()) for q in (found, plain)]
    assert weighted[0] < weighted[1]


@pytest.mark.parametrize("scheme", [one for one in INTS + FLOATS if one.search], ids=label)
def test_a_search_is_never_worse_in_any_group(scheme):
    weight = random_weight(16, 128, seed=1)
    errors = []
    for one in (scheme, replace(scheme, search=False)):
        q = quantize(weight, one, name="w")
        errors.append(((weight - dequantize(q)) ** 2).unflatten(1, (q.scale.shape[1], -1)).sum(-1))
    assert (errors[0] <= errors[1] * (1 + 1e-6)).all()
    assert errors[0].sum() < 0.99 * errors[1].sum()


@pytest.mark.parametrize("scheme", INTS + FLOATS, ids=label)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_errors_stay_within_the_bound_and_reach_it(scheme, dtype):
    weight = random_weight(16, 256, seed=2)
    q = quantize(weight, replace(scheme, scale_dtype=dtype), name="w")
    error, bound = (weight - dequantize(q)).abs(), error_bound(q)
    assert bound.shape == weight.shape
    assert (error <= bound).all()
    assert (error / bound).max() > 0.97
    if not scheme.search:
        assert (q.clipped <= 1e-4 * q.scale).all()
    if scheme.kind == "int":
        assert bound.min() < 0.501 * q.scale.max()


@pytest.mark.parametrize("scheme", [INTS[0], INTS[3], INTS[4], FLOATS[0]], ids=label)
def test_the_bound_sees_a_value_that_is_one_off(scheme):
    weight = random_weight(4, 64)
    q = quantize(weight, scheme, name="w")
    low, high = module._range(scheme)
    values = q.values.float()
    inside = (values > low + 1) & (values < high - 64)
    inside = inside & (values.abs() > 1) if scheme.kind == "fp8" else (values > low) & (values < high)
    off = values * 1.125 + 0.01 if scheme.kind == "fp8" else values + 1
    wrong = torch.where(inside, off, values).to(q.values.dtype)
    error = (weight - dequantize(replace(q, values=wrong))).abs()
    assert inside.float().mean() > 0.8
    assert (error > error_bound(replace(q, values=wrong)))[inside].float().mean() > 0.4


def test_what_is_clipped_counts_in_the_bound():
    weight = torch.full((1, 64), 0.1) * torch.linspace(-1, 1, 64)
    weight[0, 0] = 1.0
    q = quantize(weight, Scheme(bits=4), name="w", input_moments=(torch.arange(64) > 0).float())
    error, bound = (weight - dequantize(q)).abs(), error_bound(q)
    assert error[0, 0] > 5 * q.scale[0, 0]
    assert (error <= bound).all()
    assert (bound[0, 1:] < q.scale[0, 0] * 0.51)[q.values[0, 1:] < 7].all()


def test_fp8_clips_too():
    weight = torch.linspace(-0.01, 0.01, 64)[None].clone()
    weight[0, 0], weight[0, 1] = 100.0, -100.0
    plain = quantize(weight, FLOATS[0], name="w")
    q = quantize(weight, FLOATS[0], name="w", input_moments=(torch.arange(64) > 1).float())
    assert q.scale[0, 0] < 0.4 * plain.scale[0, 0]
    assert q.values[0, :2].tolist() == [448, -448]
    assert ((weight - dequantize(q)).abs() <= error_bound(q)).all()


def test_half_steps_of_fp8_are_half_the_way_to_the_next():
    numbers = torch.tensor(E4M3)
    expected = (numbers[1:] - numbers[:-1]) / 2
    assert torch.equal(module._half_step(numbers[:-1], FLOATS[0]), expected)
    assert torch.equal(module._half_step(-numbers[:-1], FLOATS[0]), expected)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_scales_are_exact_in_the_dtype_and_never_smaller_than_asked(dtype):
    scale = torch.tensor([1e-39, 1e-30, 0.001, 0.1, 1.0, 1.0001, 1 + 2**-7, 3.14159, 60000.0])
    scale = scale.clamp(min=1e-6) if dtype == "f16" else scale
    rounded = module._round_up(scale, DTYPES[dtype])
    assert torch.equal(rounded.to(DTYPES[dtype]).float(), rounded)
    assert (rounded >= scale).all()
    assert dtype == "f16" or rounded.min() == torch.finfo(torch.float32).smallest_normal
    smaller = torch.nextafter(rounded.double(), torch.zeros(())).float() if dtype == "f32" else None
    assert smaller is None or torch.equal(rounded[1:], scale[1:])
    below = (rounded.to(DTYPES[dtype]).view(torch.int16) - 1).view(DTYPES[dtype]).float() if dtype != "f32" else 0
    assert (torch.as_tensor(below) < scale)[1:].all()


@pytest.mark.parametrize("scheme", INTS + FLOATS, ids=label)
def test_zeros_and_lone_values(scheme):
    weight = random_weight(6, 64)
    weight[0], weight[1, :32], weight[2] = 0.0, 0.0, 0.25
    weight[3] = -weight[3].abs()
    q = quantize(weight, scheme, name="w")
    back = dequantize(q)
    assert not back[0].any()
    assert not back[1, :32].any()
    assert q.scale[0].eq(1.0).all()
    assert (q.scale > 0).all()
    assert ((weight - back).abs() <= error_bound(q)).all()
    torch.testing.assert_close(back[2], weight[2], rtol=0.07, atol=0)


@pytest.mark.parametrize("scheme", INTS + FLOATS, ids=label)
@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e30, 3e38])
def test_weights_of_any_finite_size(scheme, size):
    weight = (random_weight(4, 64) / 8).clamp(-1, 1) * size
    weight[0, 0], weight[0, 1] = size, -size
    q = quantize(weight, scheme, name="w")
    assert q.scale.isfinite().all()
    assert (q.scale > 0).all()
    assert ((weight - dequantize(q)).abs() <= error_bound(q)).all()
    if size > 1e-40:
        assert ((weight - dequantize(q)).double() / size).norm() < 0.3


def test_a_scale_beyond_its_dtype_is_refused_by_name():
    weight = torch.full((2, 32), 1e9)
    with pytest.raises(ConfigError, match=r"layers\.0\.x: weights as large as 1e\+09 .* f16 .* bf16 or f32"):
        quantize(weight, Scheme(bits=4, scale_dtype="f16"), name="layers.0.x")
    quantize(weight, Scheme(bits=4), name="w")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_dtypes_count_as_their_float32_values(dtype):
    weight = random_weight().to(dtype)
    for scheme in (SCHEMES["int4"], SCHEMES["fp8"]):
        q, expected = quantize(weight, scheme, name="w"), quantize(weight.float(), scheme, name="w")
        assert torch.equal(q.values.float(), expected.values.float())
        assert torch.equal(q.scale, expected.scale)


def test_a_parameter_is_read_and_left_alone():
    parameter = torch.nn.Parameter(random_weight())
    before = parameter.detach().clone()
    q = quantize(parameter, SCHEMES["int4"], name="w")
    assert not dequantize(q).requires_grad
    assert torch.equal(parameter, before)


def test_a_matrix_in_chunks_is_the_same_matrix(monkeypatch):
    weight = random_weight(11, 64)
    for scheme in (INTS[2], INTS[6], FLOATS[0]):
        whole = quantize(weight, scheme, name="w")
        monkeypatch.setattr(module, "_CHUNK", 130)
        parts = quantize(weight, scheme, name="w")
        monkeypatch.undo()
        for field in ("values", "scale", "zero_point", "clipped"):
            first, second = getattr(whole, field), getattr(parts, field)
            assert (first is second is None) or torch.equal(first.float(), second.float())


def test_finer_groups_and_zero_points_cost_less():
    weight = random_weight(16, 256, seed=3)
    weight[:, 7] *= 8  # one loud input
    weight += 0.02
    errors = {
        name: float((weight - dequantize(quantize(weight, scheme, name="w"))).norm() / weight.norm())
        for name, scheme in {
            "row": Scheme(bits=4),
            "128": Scheme(bits=4, group_size=128),
            "64": Scheme(bits=4, group_size=64),
            "32": Scheme(bits=4, group_size=32),
            "32a": Scheme(bits=4, group_size=32, symmetric=False),
            "8": Scheme(bits=8),
        }.items()
    }
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    assert errors["row"] > 10 * errors["8"]


@pytest.mark.parametrize(("width", "group", "fitting"), [(576, 128, "32, 64, null"), (48, 32, "null")])
def test_a_group_that_does_not_divide_is_refused_by_name(width, group, fitting):
    text = (
        rf"quant\.group_size: got {group}, .* {width}, the width of layers\.1\.mlp\.up_proj.*; accepted .*: {fitting}$"
    )
    with pytest.raises(ConfigError, match=text):
        quantize(torch.ones(4, width), Scheme(bits=4, group_size=group), name="layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("shape", [(5, 128), (3, 384)])
def test_every_group_size(group, shape):
    q = quantize(random_weight(*shape), Scheme(bits=4, group_size=group), name="w")
    assert q.scale.shape == (shape[0], shape[1] // group)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_by_name(bad):
    weight = random_weight()
    weight[1, 3:5] = bad
    with pytest.raises(CheckpointError, match=r"layers\.0\.x: 2 of 192 weights are NaN or infinite"):
        quantize(weight, SCHEMES["int8"], name="layers.0.x")


@pytest.mark.parametrize(
    "weight", [torch.ones(8), torch.ones(2, 32, 32), torch.ones(2, 32, dtype=torch.int64), torch.ones(0, 32)]
)
def test_what_is_no_matrix_of_floats_is_refused_by_name(weight):
    with pytest.raises(ConfigError, match=r"norm\.weight: got \w+ of shape \[.*\]; only a matrix"):
        quantize(weight, SCHEMES["int8"], name="norm.weight")


@pytest.mark.parametrize("moments", [torch.ones(3), torch.full((64,), -1.0), torch.full((64,), math.nan)])
def test_moments_that_do_not_fit_are_refused(moments):
    with pytest.raises(ConfigError, match=r"w: input_moments .* accepted: \[64\]"):
        quantize(random_weight(), SCHEMES["int4"], name="w", input_moments=moments)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bits": 3}, "bits: got 3; accepted: 4, 8"),
        ({"kind": "nf4"}, "kind: got 'nf4'; accepted: int, fp8"),
        ({"group_size": 16}, "group_size: got 16; accepted: null, 32, 64, 128"),
        ({"scale_dtype": "f64"}, "scale_dtype: got 'f64'; accepted: bf16, f16, f32"),
        ({"kind": "fp8", "bits": 4}, "kind: got 'fp8'"),
        ({"kind": "fp8", "group_size": 32}, "kind: got 'fp8'"),
        ({"kind": "fp8", "symmetric": False}, "kind: got 'fp8'"),
    ],
)
def test_schemes_that_cannot_be(wrong, said):
    with pytest.raises(ValueError, match=said):
        Scheme(**wrong)


def test_schemes_by_the_name_that_users_give():
    assert scheme_of("int4") == SCHEMES["int4"]
    assert scheme_of("fp8", dtype="f32") == replace(SCHEMES["fp8"], scale_dtype="f32")
    assert SCHEMES["int4"].group_size == 32
    assert not SCHEMES["int4"].dynamic_activations
    assert SCHEMES["int8"].dynamic_activations
    assert SCHEMES["fp8"].dynamic_activations
    with pytest.raises(ConfigError, match="quant: got 'int5'; accepted: none, int8, int4, fp8"):
        scheme_of("int5")
    with pytest.raises(ConfigError, match="dtype: got 'f64'; accepted: bf16, f16, f32"):
        scheme_of("int8", dtype="f64")
