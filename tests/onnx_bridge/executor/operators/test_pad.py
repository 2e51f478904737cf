"""Padding."""

import numpy as np

from tests.onnx_bridge.executor.operators.one_node import (
    Case,
    check,
    check_refused,
    floats,
    integers,
    ints,
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


def test_they_compute_what_onnx_says():
    check(CASES)


REFUSED = [
    (Case("Pad", (X, ints(1, 1)), known=(1,)), r"pads \[1, 1\] are not two numbers for each of 3"),
    (Case("Pad", (X, ints(0, 0, 1 << 40, 0, 0, 0)), {"mode": "wrap"}, (1,)), "than 1024 times"),
    (Case("Pad", (X, AROUND), {"mode": "mirror"}, (1,)), "mode is 'mirror'; possible are 'const"),
]  # fmt: skip


def test_what_cannot_be_computed_raises():
    check_refused(REFUSED)
