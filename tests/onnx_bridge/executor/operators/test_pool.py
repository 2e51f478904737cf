"""Pooling."""

import numpy as np

from tests.onnx_bridge.executor.operators.one_node import (
    Case,
    check,
    check_refused,
    floats,
    integers,
)

X = floats(8, 3, 8, 7)
BATCH, ROWS = {0: 0}, {0: 2}
PADS = {"pads": [1, 0, 1, 1]}
HANGING = {"kernel_shape": [3, 2], "strides": [2, 3], "ceil_mode": 1}
SQUARE = {"kernel_shape": [3, 2]}

CASES = [
    *(
        Case(op, (X,), attributes, split=split, note=note, gradient=True)
        for op in ("MaxPool", "AveragePool", "LpPool")
        for note, split, attributes in (
            ("plain", BATCH, SQUARE),
            ("split along rows", ROWS, {**SQUARE, "strides": [2, 2]}),
            ("padded", None, {**SQUARE, **PADS, "strides": [2, 1]}),
            ("same upper", None, {**SQUARE, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
            ("dilated", None, {**SQUARE, "dilations": [2, 3]}),
        )
    ),
    *(
        Case(op, (X,), {**HANGING, **pads}, opset=opset, note=note)
        for op in ("MaxPool", "AveragePool")
        for opset in (13, 22)
        for note, pads in (("hanging", {}), ("hanging, padded", PADS))
        if (op, opset) != ("AveragePool", 13)
    ),
    Case("AveragePool", (X,), {**SQUARE, **PADS, "count_include_pad": 1}, note="pads counted"),
    Case("MaxPool", (X,), {**SQUARE, **PADS}, outputs=2, note="places", split=BATCH),
    Case("MaxPool", (X,), {**SQUARE, "storage_order": 1}, outputs=2, note="down the columns"),
    Case("MaxPool", (integers(2, 2, 6, dtype=np.int8),), {"kernel_shape": [2]}, note="int8"),
    Case("MaxPool", (floats(2, 2, 4, 4, 4),), {"kernel_shape": [2, 2, 2]}, note="3-d"),
    Case("LpPool", (X,), {**SQUARE, "p": 3}, note="p"),
    *(Case(op, (X,), split=BATCH) for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")),
    Case("GlobalAveragePool", (X,), split=ROWS, note="split along rows"),
    Case("GlobalLpPool", (X,), {"p": 1}, note="p"),
]


def test_they_compute_what_onnx_says():
    check(CASES)


REFUSED = [
    (Case("MaxPool", (X,), {"kernel_shape": [1 << 40, 1], "dilations": [2, 1]}), "than 4096 elem"),
    (Case("AveragePool", (X,), {**SQUARE, "pads": [1 << 40] * 4}), "the windows are .* more than"),
    (Case("GlobalMaxPool", (floats(2, 3),)), r"shape \(2, 3\), not \(batch, channels"),
]  # fmt: skip


def test_what_cannot_be_computed_raises():
    check_refused(REFUSED)
