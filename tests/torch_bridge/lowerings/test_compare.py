import pytest
import torch

from tests.torch_bridge.lowerings.harness import check
from tests.torch_bridge.lowerings.samples import (
    BOOLS,
    EMPTY,
    FLOATS,
    HALVES,
    INTS,
    ROW,
    SCALAR,
    SPECIAL,
)

aten = torch.ops.aten
_NAMES = ["eq", "ne", "lt", "le", "gt", "ge"]


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize(
    "pair",
    [
        (FLOATS, ROW),
        (SPECIAL[:, None], SPECIAL),
        (INTS, ROW),
        (INTS, SCALAR),
        (BOOLS, INTS),
        (HALVES, HALVES.flip(0)),
        (EMPTY, ROW),
    ],
    ids=["floats", "special", "int-float", "0-d", "bool-int", "halves", "empty"],
)
def test_tensors(name, pair):
    check(getattr(aten, name).Tensor, *pair)


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("number", [2, 2.5, 0, True])
def test_numbers(name, number):
    check(getattr(aten, name).Scalar, INTS, number)
    check(getattr(aten, name).Scalar, SPECIAL, number)
