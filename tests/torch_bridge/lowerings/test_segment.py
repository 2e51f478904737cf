"""Segment reductions against CPU torch: lengths and offsets, empty segments, ties, zeros."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.harness import check

aten = torch.ops.aten
DATA = torch.tensor([[1.0, 2.0], [0.0, -3.0], [4.0, 4.0], [4.0, 0.0], [-1.0, 0.0], [2.0, 5.0]])
REDUCTIONS = ["sum", "mean", "max", "min", "prod"]


@pytest.mark.parametrize("initial", [None, 0.5])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_lengths_and_offsets(reduce, initial):
    lengths, offsets = torch.tensor([1, 0, 3, 2]), torch.tensor([0, 1, 1, 4, 6])
    for given in ({"lengths": lengths}, {"offsets": offsets}):
        check(aten.segment_reduce.default, DATA, reduce, **given, initial=initial, unsafe=True)
        out = aten.segment_reduce(DATA, reduce, **given, initial=initial, unsafe=True)
        grad = torch.arange(8.0).reshape(4, 2) + 1
        arguments = (grad, out, DATA, reduce)
        check(aten._segment_reduce_backward.default, *arguments, **given, initial=initial)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_rows_with_segments_of_their_own(reduce):
    lengths = torch.tensor([[1, 1], [2, 0], [0, 2]])
    data = DATA.reshape(3, 2, 2)
    check(aten.segment_reduce.default, data, reduce, lengths=lengths, axis=1, unsafe=True)


def test_refusals():
    with pytest.raises(RuntimeError, match="Either lengths or offsets must be defined"):
        aten.segment_reduce(DATA.to("jax"), "sum")
