"""Reading by indices against CPU torch: gathers, selections, searches."""

import torch

from tests.torch_bridge.lowerings.harness import together
from tests.torch_bridge.lowerings.samples import BOOLS, CUBE, EMPTY, FLOATS, INTS, ROW, SCALAR

aten = torch.ops.aten
I0 = torch.tensor([1, 0, -1])
I1 = torch.tensor([[0], [2]])
I2 = torch.tensor([3, -2, 0])


def test_indexing():
    with together() as check:
        for indices in (
            [I0],
            [None, I0],
            [None, None, I2],
            [I0, None, I2],
            [None, I1, I2],
            [I1[:, :1] % 2, I1],
            [torch.tensor(1), None, I2],
            [I0, I0, I0],
            [torch.tensor([], dtype=torch.int64)],
        ):
            check(aten.index.Tensor, CUBE, indices)
        check(aten._unsafe_index.Tensor, CUBE, [I0, None, I2])
        mask = torch.tensor([[True, False, True]])
        check(aten._unsafe_masked_index.default, FLOATS, mask, [I1 % 3, I2 % 4], 0)
        index = torch.tensor([[[0, 1], [1, 1]], [[1, 0], [0, 0]]])
        for dim in (0, 1, -1):
            check(aten.gather.default, CUBE, dim, index)
        check(aten.gather.default, SCALAR, 0, torch.tensor([0, 0]))
        check(aten.gather.default, SCALAR, 0, torch.tensor(0))
        check(aten.gather.default, ROW, 0, torch.tensor(2))
        check(aten.gather.default, FLOATS, 1, torch.empty(0, 2, dtype=torch.int64))
        check(aten.index_select.default, CUBE, 1, torch.tensor([2, 0, 2]))
        check(aten.index_select.default, CUBE, -1, torch.tensor(3))
        check(aten.index_select.default, SCALAR, 0, torch.tensor([0]))
        check(aten.index_select.default, EMPTY, 1, torch.tensor([1, 1]))
        check(aten.take.default, FLOATS, torch.tensor([[0, -1], [5, 11]]))
        check(aten.take.default, SCALAR, torch.tensor([0, 0]))
        for mask in (BOOLS, BOOLS[:1], BOOLS[:, :1]):
            check(aten.masked_scatter.default, INTS, mask, torch.arange(12) * 10)
            check(aten.masked_scatter_backward.default, FLOATS, mask.expand(3, 4), [4, 3])
        check(aten.nonzero_static.default, BOOLS, size=10, fill_value=-1)
        check(aten.nonzero_static.default, INTS, size=3)


def test_searches():
    values = torch.tensor([[-1.0, 0.0, 1.5], [2.0, 3.0, 1000.0]])
    search = aten.searchsorted
    with together() as check:
        for rows in (6, 300):
            boundaries = torch.arange(rows) // 2 * 1.5
            for right in (False, True)[: 2 if rows == 6 else 1]:
                check(aten.bucketize.Tensor, values, boundaries, right=right)
                check(search.Tensor, boundaries, values, right=right)
                each = boundaries.expand(2, rows).contiguous()
                check(search.Tensor, each, values, right=right)
                check(search.Scalar, boundaries, 1.5, right=right)
            check(aten.bucketize.Scalar, 3, boundaries, out_int32=True)
            check(search.Tensor, boundaries.long(), values.long(), side="right")
        unsorted, order = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1, 2, 0])
        check(search.Tensor, unsorted, torch.tensor([1.5, 3.0]), sorter=order)
