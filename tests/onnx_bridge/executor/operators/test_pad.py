"""Padding."""

import numpy as np
import pytest

from isoshard.onnx_bridge import ModelError
from tests.onnx_bridge.executor.operators.one_node import (
    Case,
    check,
    floats,
    integers,
    ints,
    jitted,
)

X = floats(8, 4, 5)
ROWS = {0: 0}
AROUND = ints(0, 1, 2, 0, 2, 1)

CASES = [
    *(
        Case("Pad", (X, AROUND), {"mode": mode}, (1,), split=ROWS, note=mode)
        for mode in ("constant", "reflect", "edge", "wrap")
    ),
    Case("Pad", (X, AROUND, np.float32(7)), {}, (1,), opset=13, note="a value"),
    Case("Pad", (X, ints(1, 1, -1, 2), np.float32(7), ints(-1, 0)), {}, (1, 3), split=ROWS,
         note="axes, cut"),
    Case("Pad", (integers(8, 3), ints(0, 1, 2, 1)), known=(1,), note="integers"),
    Case("Pad", (X,), {"pads": [0, 1, 0, 0, 0, 1], "value": 2.0}, opset=10, note="attributes"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_computes_what_onnx_says(case):
    check(case)


def test_pads_that_do_not_fit_the_axes_are_refused():
    with pytest.raises(ModelError, match=r"pads \[1, 1\] are not two numbers for each of 3 axes"):
        jitted(Case("Pad", (X, ints(1, 1)), known=(1,)))


def test_pads_that_would_never_end_are_refused():
    with pytest.raises(ModelError, match="more than 1024 times"):
        jitted(Case("Pad", (X, ints(0, 0, 1 << 40, 0, 0, 0)), {"mode": "wrap"}, (1,)))


def test_an_unknown_mode_is_refused():
    with pytest.raises(ModelError, match="mode is 'mirror'; possible are 'constant', 'reflect'"):
        jitted(Case("Pad", (X, AROUND), {"mode": "mirror"}, (1,)))
