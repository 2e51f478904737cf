import math

import pytest
import torch

import isoshard.torch_bridge  # noqa: F401  (registers the device)
from tests.torch_bridge.lowerings.harness import check, evaluate
from tests.torch_bridge.lowerings.samples import (
    BOOLS,
    CUBE,
    EMPTY,
    FLOATS,
    HALVES,
    INT_SCALAR,
    INTS,
    NAN,
    SCALAR,
    SPECIAL,
    TIES,
)
from tests.torch_bridge.on_both import raises_on_both, same

aten = torch.ops.aten
_VALUES = {
    "floats": FLOATS,
    "ints": INTS,
    "bools": BOOLS,
    "halves": HALVES,
    "ties": TIES,
    "0-d": SCALAR,
    "empty": EMPTY,
}
values = pytest.mark.parametrize("values", _VALUES.values(), ids=_VALUES.keys())


@values
@pytest.mark.parametrize("descending", [False, True])
def test_stable_sort(values, descending):
    check(aten.sort.stable, values, stable=True, dim=-1, descending=descending)
    check(aten.sort.stable, values, stable=True, dim=0, descending=descending)


def test_sort_puts_nan_last():
    values, places = evaluate(aten.sort.default, SPECIAL)
    assert math.isnan(values[-1])
    assert math.isnan(SPECIAL[int(places[-1])])


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_topk(k, largest):
    check(aten.topk.default, FLOATS, k, -1, largest)
    check(aten.topk.default, CUBE[:, :, :3], min(k, 2), 0, largest)
    check(aten.topk.default, torch.tensor([1.0, NAN, 3.0]), k, 0, largest)


def test_topk_of_0d():
    check(aten.topk.default, SCALAR, 1)


@pytest.mark.parametrize("keepdim", [False, True])
def test_kth_and_median(keepdim):
    for dim in (0, 1, -1):
        check(aten.kthvalue.default, CUBE, 2, dim, keepdim)
        check(aten.median.dim, FLOATS, dim, keepdim)
        check(aten.nanmedian.dim, FLOATS, dim, keepdim)
    check(aten.median.dim, SCALAR, 0, keepdim)
    check(aten.kthvalue.default, SCALAR, 1, 0, keepdim)


@pytest.mark.parametrize("name", ["median", "nanmedian"])
@pytest.mark.parametrize("values", [INTS, SPECIAL, TIES, SCALAR, torch.empty(0)])
def test_median_of_all(name, values):
    check(getattr(aten, name).default, values)


def test_median_with_nan():
    values = torch.tensor([[1.0, NAN, 3.0, NAN], [5.0, 4.0, 6.0, 1.0]])
    check(aten.median.dim, values, 1)
    check(aten.nanmedian.dim, values, 1)


def test_mode():
    check(aten.mode.default, torch.tensor([[3, 1, 3, 2], [1, 2, 2, 1], [4, 4, 4, 4]]))
    check(aten.mode.default, torch.tensor([[1.0, 2.0], [2.0, 2.0], [1.0, 2.0]]), 0, True)
    check(aten.mode.default, INT_SCALAR)


@pytest.mark.parametrize("name", ["cummax", "cummin"])
@pytest.mark.parametrize("values", [FLOATS, TIES, INTS, BOOLS, SCALAR])
def test_running_extremes(name, values):
    check(getattr(aten, name).default, values, -1)
    check(getattr(aten, name).default, values, 0)


@pytest.mark.parametrize("size", [(0, 2), (0, 2, 2), (2, 0, 3)])
def test_modes_of_no_rows(size):
    x = torch.empty(size)
    same(x.to("jax").mode(), x.mode())


@pytest.mark.parametrize("size", [(2, 0), (0,), (0, 0)])
def test_modes_of_empty_rows_are_refused(size):
    raises_on_both(lambda x: x.mode(), torch.empty(size), match="to have non-zero size")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.bfloat16])
def test_the_median_of_nothing(dtype):
    x = torch.empty(0, dtype=dtype)
    same(x.to("jax").median(), x.median())
    same(x.to("jax").nanmedian(), x.nanmedian())


@pytest.mark.parametrize("name", ["aminmax", "sort", "argsort", "msort"])
@pytest.mark.parametrize("size", [(), (3,)])
def test_complex_numbers_have_no_order(name, size):
    x = torch.zeros(size, dtype=torch.complex64)
    raises_on_both(lambda x: getattr(x, name)(), x, match="complex|ComplexFloat", grad=False)


@pytest.mark.parametrize("name", ["mode", "cummax", "cummin"])
def test_a_complex_number_alone(name):
    x = torch.tensor(1 + 2j)
    args = () if name == "mode" else (0,)
    same(tuple(getattr(x.to("jax"), name)(*args)), tuple(getattr(x, name)(*args)))
