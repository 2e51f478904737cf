import pytest
import torch

from tests.torch_bridge.lowerings.harness import check
from tests.torch_bridge.lowerings.samples import BOOLS, CUBE, EMPTY, FLOATS, INTS, ROW, SCALAR

aten = torch.ops.aten
I0 = torch.tensor([1, 0, -1])
I1 = torch.tensor([[0], [2]])
I2 = torch.tensor([3, -2, 0])


@pytest.mark.parametrize(
    "indices",
    [
        [I0],
        [None, I0],
        [None, None, I2],
        [I0, None, I2],
        [None, I1, I2],
        [I1[:, :1] % 2, I1],
        [torch.tensor(1), None, I2],
        [I0, I0, I0],
        [torch.tensor([], dtype=torch.int64)],
    ],
)
@pytest.mark.parametrize("op", [aten.index.Tensor, aten._unsafe_index.Tensor])
def test_index(op, indices):
    check(op, CUBE, indices)


def test_masked_index():
    mask = torch.tensor([[True, False, True]])
    check(aten._unsafe_masked_index.default, FLOATS, mask, [I1 % 3, I2 % 4], 0)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather(dim):
    index = torch.tensor([[[0, 1], [1, 1]], [[1, 0], [0, 0]]])
    check(aten.gather.default, CUBE, dim, index)


def test_gather_of_0d_and_nothing():
    check(aten.gather.default, SCALAR, 0, torch.tensor([0, 0]))
    check(aten.gather.default, SCALAR, 0, torch.tensor(0))
    check(aten.gather.default, ROW, 0, torch.tensor(2))
    check(aten.gather.default, FLOATS, 1, torch.empty(0, 2, dtype=torch.int64))


def test_selects():
    check(aten.index_select.default, CUBE, 1, torch.tensor([2, 0, 2]))
    check(aten.index_select.default, CUBE, -1, torch.tensor(3))
    check(aten.index_select.default, SCALAR, 0, torch.tensor([0]))
    check(aten.index_select.default, EMPTY, 1, torch.tensor([1, 1]))
    check(aten.take.default, FLOATS, torch.tensor([[0, -1], [5, 11]]))
    check(aten.take.default, SCALAR, torch.tensor([0, 0]))


@pytest.mark.parametrize("mask", [BOOLS, BOOLS[:1], BOOLS[:, :1]], ids=["full", "row", "column"])
def test_masked_scatter(mask):
    source = torch.arange(12) * 10
    check(aten.masked_scatter.default, INTS, mask, source)
    check(aten.masked_scatter_backward.default, FLOATS, mask.expand(3, 4), [4, 3])


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("rows", [6, 300], ids=["few", "many"])
def test_searches(right, rows):
    boundaries = torch.arange(rows) // 2 * 1.5
    values = torch.tensor([[-1.0, 0.0, 1.5], [2.0, 3.0, 1000.0]])
    check(aten.bucketize.Tensor, values, boundaries, right=right)
    check(aten.searchsorted.Tensor, boundaries, values, right=right)
    check(aten.searchsorted.Tensor, boundaries.expand(2, rows).contiguous(), values, right=right)
    check(aten.searchsorted.Scalar, boundaries, 1.5, right=right)
    check(aten.bucketize.Scalar, 3, boundaries, out_int32=True)
    check(aten.searchsorted.Tensor, boundaries.long(), values.long(), side="right")


def test_search_by_a_sorter():
    check(
        aten.searchsorted.Tensor,
        torch.tensor([3.0, 1.0, 2.0]),
        torch.tensor([1.5, 3.0]),
        sorter=torch.tensor([1, 2, 0]),
    )


def test_nonzero_of_known_size():
    check(aten.nonzero_static.default, BOOLS, size=10, fill_value=-1)
    check(aten.nonzero_static.default, INTS, size=3)
