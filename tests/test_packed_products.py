# The kernels against products by definition, row by row and in slices, and weights that pass for tensors.

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drafters.heads.layers import join
from drafters.packed import products
from drafters.packed.nibbles import tile
from drafters.packed.products import Int4Matrix, Int8Matrix, dequantize, quantize_rows
from drafters.packed.weight import PackedWeight, Rows
from tests.packed_doubles import NaiveMatrix

KINDS = ["int8", "int8 float inputs", "int8 asymmetric", "int8 asymmetric float inputs", "int4", "int4 asymmetric"]


def numbers(seed=0):
    return torch.Generator().manual_seed(seed)


def make(kind, rows=192, width=96, seed=0):
    generator = numbers(seed)
    if kind.startswith("int8"):
        zero = torch.randint(-20, 20, (rows,), generator=generator).to(torch.int8) if "asymmetric" in kind else None
        values = torch.randint(-128, 128, (rows, width), generator=generator).to(torch.int8)
        scale = torch.rand(rows, generator=generator).bfloat16().float() / 100
        return Int8Matrix(values, scale, zero, quantized_inputs="float" not in kind)
    values = torch.randint(-8, 8, (rows, width), generator=generator).to(torch.int8)
    pairs = torch.rand(width // 32, rows, 2, generator=generator)
    pairs[..., 1] = pairs[..., 1] - 0.5 if "asymmetric" in kind else 0.0
    return Int4Matrix(tile(values), (pairs / 10).bfloat16())


def inputs(count, width=96, dtype=torch.float32):
    return torch.randn(count, width, generator=numbers(7)).to(dtype)


def assert_near(found, wanted):
    """Sums in bfloat16 are rounded once more than in float32, and so are weights that became floats."""
    tolerance = 2e-6 if found.dtype == torch.float32 else 5e-3
    assert float((found.float() - wanted).norm() / wanted.norm()) < tolerance


def test_rows_are_rounded_to_their_own_steps():
    x = torch.tensor([[1.0, -127.0, 63.4], [0.0, 0.0, 0.0], [1e-3, 2e-3, -5e-4]])
    values, step = quantize_rows(x)
    assert values.tolist()[:2] == [[1, -127, 63], [0, 0, 0]]
    assert float(step[0]) == 1.0
    assert ((values * step - x).abs() <= step / 2 * 1.0001).all()
    alone = [quantize_rows(row[None]) for row in x]
    assert torch.equal(torch.cat([one for one, _ in alone]), values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3, 5, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_definition(kind, count, dtype):
    matrix, x = make(kind), inputs(count, dtype=dtype)
    twin = NaiveMatrix(matrix)
    for start, stop in ((0, 192), (64, 192), (0, 128), (40, 100)):
        found = matrix.product(x, start, stop)
        assert found.shape == (count, stop - start)
        assert_near(found, twin.product(x, start, stop))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("int8")])
@pytest.mark.parametrize("width", [1, 6, 24, 40, 48, 64])
@pytest.mark.parametrize("rows", [5, 97])
def test_products_of_any_width_are_those_of_the_definition(kind, width, rows):
    matrix, x = make(kind, rows, width), inputs(3, width)
    for start, stop in ((0, rows), (2, 5)):
        found = matrix.product(x, start, stop)
        assert_near(found, NaiveMatrix(matrix).product(x, start, stop))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_weights(kind):
    matrix = make(kind)
    ids = torch.tensor([5, 0, 191, 5])
    if kind.startswith("int8"):
        zero = 0 if matrix.zero_N is None else matrix.zero_N[:, None].float()
        wanted = (matrix.values_NK.float() - zero) * matrix.scale_N[:, None]
    else:
        values = torch.zeros(192, 96)
        for k in range(96):
            unit = torch.zeros(1, 96)
            unit[0, k] = 1.0
            values[:, k] = matrix.product(unit, 0, 192)[0].float()
        wanted = values
    torch.testing.assert_close(matrix.rows(ids), wanted[ids], rtol=1e-2, atol=1e-3)


def test_dequantize_takes_each_group_by_itself():
    values = torch.tensor([[1, 2, 3, -4]], dtype=torch.int8)
    pairs = torch.tensor([[[0.5, 1.0]], [[2.0, 0.0]]])
    assert dequantize(values, pairs).tolist() == [[1.5, 2.0, 6.0, -8.0]]


@pytest.mark.parametrize("kind", ["int8", "int8 asymmetric"])
def test_a_row_of_integers_is_the_same_in_any_batch(kind):
    matrix, x = make(kind), inputs(50)
    whole = matrix.product(x, 0, 192)
    for count in (1, 7, 33):
        assert torch.equal(matrix.product(x[:count], 0, 192), whole[:count])
    assert torch.equal(matrix.product(x, 64, 128), whole[:, 64:128])


@pytest.mark.parametrize("kind", ["int4", "int4 asymmetric"])
def test_another_cpu_gets_another_layout_and_the_same_products(kind, monkeypatch):
    here, x = make(kind), inputs(5)
    assert here._kernel_form is here.packed or not products._reads_tiles()
    monkeypatch.setattr(products, "_reads_tiles", lambda: False)
    there = make(kind)
    assert there._kernel_form is not there.packed
    assert torch.equal(there.product(x, 64, 192), here.product(x, 64, 192))
    assert sum(a.nbytes for a in there.arrays()) > sum(a.nbytes for a in here.arrays())


def test_floats_are_made_only_for_many_rows_and_once():
    matrix = make("int8 float inputs")
    size = sum(array.nbytes for array in matrix.arrays())
    matrix.product(inputs(products.MOST_ROWS, dtype=torch.bfloat16), 0, 192)
    assert sum(array.nbytes for array in matrix.arrays()) == size
    for _ in range(2):
        matrix.product(inputs(products.MOST_ROWS + 1, dtype=torch.bfloat16), 64, 128)
        assert sum(array.nbytes for array in matrix.arrays()) == size + 2 * 64 * 96


# Weights.


def weight_of(kind="int8", *, dtype=torch.float32, parts=((0, 192),), seed=0):
    matrix = make(kind, seed=seed)
    found = [PackedWeight([Rows(matrix, start, stop)], dtype) for start, stop in parts]
    return found[0] if len(found) == 1 else found


def test_a_weight_tells_what_a_tensor_tells():
    weight = weight_of(dtype=torch.bfloat16)
    assert isinstance(weight, torch.Tensor)
    assert (weight.shape, weight.dtype, weight.device) == ((192, 96), torch.bfloat16, torch.device("cpu"))
    assert (len(weight), weight.dim(), weight.numel(), weight.requires_grad) == (192, 2, 192 * 96, False)
    assert weight.nbytes == 192 * 96 + 4 * 192
    assert "192, 96" in repr(weight)


@pytest.mark.parametrize("kind", KINDS)
def test_ways_to_multiply_are_one(kind):
    weight, x = weight_of(kind), inputs(6).view(2, 3, 96)
    twin = NaiveMatrix(weight.pieces[0].matrix)
    wanted = twin.product(x.flatten(0, 1), 0, 192).view(2, 3, 192)
    bias = torch.randn(192, generator=numbers(3))
    for found in (F.linear(x, weight), x @ weight.T, torch.matmul(x, weight.T)):
        assert found.dtype == torch.float32
        assert_near(found, wanted)
    assert_near(F.linear(x, weight, bias), wanted + bias)
    assert F.linear(x, weight.to(torch.bfloat16)).dtype == torch.bfloat16
    assert F.linear(x[0, 0], weight).shape == (192,)


def test_neighbours_join_without_a_copy_and_strangers_stay_pieces():
    first, second, third = weight_of(parts=((0, 64), (64, 128), (128, 192)))
    joined = join(torch.bfloat16, first, second, third)
    assert (joined.shape, joined.dtype) == ((192, 96), torch.bfloat16)
    assert [(piece.start, piece.stop) for piece in joined.pieces] == [(0, 192)]
    assert joined.pieces[0].matrix is first.pieces[0].matrix
    other = weight_of(seed=5)
    both = torch.cat([joined[100:], other])
    assert [(piece.start, piece.stop) for piece in both.pieces] == [(100, 192), (0, 192)]
    x = inputs(4, dtype=torch.bfloat16)
    wanted = torch.cat([F.linear(x, joined)[:, 100:], F.linear(x, other.to(torch.bfloat16))], dim=-1)
    assert torch.equal(F.linear(x, both), wanted)
    assert torch.equal(F.linear(x, both[90:100]), wanted[:, 90:100])


def test_join_of_plain_weights_stays_what_it_was():
    first, second = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4, 3))
    joined = join(torch.float32, first, second)
    assert torch.equal(joined, torch.cat([first, second]))
    joined.sum().backward()
    assert torch.equal(second.grad, torch.ones(4, 3))


def test_it_is_looked_up_as_an_embedding_is():
    table = nn.Embedding(192, 96)
    table.weight = nn.Parameter(weight_of("int8 float inputs"), requires_grad=False)
    ids = torch.tensor([[3, 0], [191, 3]])
    wanted = table.weight.as_floats()[ids]
    assert torch.equal(table(ids), wanted)
    assert torch.equal(F.embedding(ids, table.weight[:]), wanted)
    inside = ids.clamp(max=190)
    assert torch.equal(F.embedding(inside, table.weight[1:]), table.weight.as_floats()[inside + 1])
    assert table.weight.new_zeros(2, 5).tolist() == [[0.0] * 5] * 2


def test_it_is_a_parameter_of_a_module():
    layer = nn.Linear(96, 192)
    layer.weight = nn.Parameter(weight_of(), requires_grad=False)
    x = inputs(3)
    wanted = layer(x)
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.state_dict()["weight"].shape == (192, 96)
    for moved in (layer.to("cpu"), copy.deepcopy(layer), layer.requires_grad_(False).eval()):
        assert torch.equal(moved(x), wanted)
        assert isinstance(moved.weight, PackedWeight)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half.weight.dtype == torch.bfloat16
    assert torch.equal(half(x.bfloat16()), F.linear(x.bfloat16(), layer.weight.to(torch.bfloat16), half.bias))


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight + 1,
        lambda weight: weight.clone(),
        lambda weight: weight[0],
        lambda weight: torch.add(weight.T, 1),
        lambda weight: weight.float().sum(),
        lambda weight: torch.zeros(192, 96).copy_(weight),
    ],
)
def test_all_else_is_refused(use):
    with pytest.raises(NotImplementedError, match="packed weight"):
        use(weight_of())
