"""Sorting, medians, modes and running extremes against CPU torch: ties, NaN, no elements."""

import math

import pytest
import torch

import isoshard.torch_bridge  # noqa: F401  (registers the device)
from tests.torch_bridge.lowerings.harness import evaluate, together
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


def test_sorting():
    with together() as check:
        for values in (FLOATS, INTS, BOOLS, HALVES, TIES, SCALAR, EMPTY):
            for descending, dim in ((False, -1), (True, 0)):
                options = {"stable": True, "dim": dim, "descending": descending}
                check(aten.sort.stable, values, **options)
        for k in (0, 1, 3):
            for largest in (True, False):
                check(aten.topk.default, FLOATS, k, -1, largest)
                check(aten.topk.default, CUBE[:, :, :3], min(k, 2), 0, largest)
                check(aten.topk.default, torch.tensor([1.0, NAN, 3.0]), k, 0, largest)
        check(aten.topk.default, SCALAR, 1)
    values, places = evaluate(aten.sort.default, SPECIAL)
    assert math.isnan(values[-1])
    assert math.isnan(SPECIAL[int(places[-1])])


def test_medians_modes_and_running_extremes():
    nans = torch.tensor([[1.0, NAN, 3.0, NAN], [5.0, 4.0, 6.0, 1.0]])
    with together() as check:
        for keepdim, dim in ((False, 0), (True, -1)):
            check(aten.kthvalue.default, CUBE, 2, dim, keepdim)
            check(aten.median.dim, FLOATS, dim, keepdim)
            check(aten.median.dim, SCALAR, 0, keepdim)
        for packet in (aten.median, aten.nanmedian):
            for values in (INTS, SPECIAL, TIES, SCALAR, torch.empty(0)):
                check(packet.default, values)
            check(packet.dim, nans, 1)
        check(aten.mode.default, torch.tensor([[3, 1, 3, 2], [1, 2, 2, 1], [4, 4, 4, 4]]))
        check(aten.mode.default, torch.tensor([[1.0, 2.0], [2.0, 2.0], [1.0, 2.0]]), 0, True)
        check(aten.mode.default, INT_SCALAR)
        for op in (aten.cummax.default, aten.cummin.default):
            for values in (FLOATS, TIES, INTS, BOOLS, SCALAR):
                check(op, values, -1)
                check(op, values, 0)


def test_modes_and_medians_of_nothing():
    for size in ((0, 2), (0, 2, 2), (2, 0, 3)):
        x = torch.empty(size)
        same(x.to("jax").mode(), x.mode())
    for size in ((2, 0), (0,), (0, 0)):
        raises_on_both(lambda x: x.mode(), torch.empty(size), match="to have non-zero size")
    for dtype in (torch.int32, torch.bool, torch.bfloat16):
        x = torch.empty(0, dtype=dtype)
        same(x.to("jax").median(), x.median())
        same(x.to("jax").nanmedian(), x.nanmedian())


@pytest.mark.parametrize("size", [(), (3,)])
def test_complex_numbers_have_no_order(size):
    x = torch.zeros(size, dtype=torch.complex64)
    for name in ("aminmax", "sort", "argsort", "msort"):
        raises_on_both(
            lambda x, name=name: getattr(x, name)(), x, match="complex|ComplexFloat", grad=False
        )
    if not size:  # alone it is its own mode and extreme
        for name, args in (("mode", ()), ("cummax", (0,)), ("cummin", (0,))):
            same(tuple(getattr(x.to("jax"), name)(*args)), tuple(getattr(x, name)(*args)))
