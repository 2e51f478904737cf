"""Pooling."""

import numpy as np
import pytest

from isoshard.onnx_bridge import ModelError
from tests.onnx_bridge.executor.operators.one_node import Case, check, floats, integers, jitted

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
            ("same lower", None, {**SQUARE, "auto_pad": "SAME_LOWER"}),
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
    Case("AveragePool", (X,), {**HANGING, **PADS, "count_include_pad": 1}, note="hanging, counted"),
    Case("MaxPool", (X,), {**SQUARE, **PADS}, outputs=2, note="places", split=BATCH),
    Case("MaxPool", (X,), {**SQUARE, "storage_order": 1}, outputs=2, note="down the columns"),
    Case("MaxPool", (integers(2, 2, 6, dtype=np.int8),), {"kernel_shape": [2]}, note="int8"),
    Case("MaxPool", (floats(2, 2, 4, 4, 4),), {"kernel_shape": [2, 2, 2]}, note="3-d"),
    Case("LpPool", (X,), {**SQUARE, "p": 3}, note="p"),
    *(Case(op, (X,), split=BATCH) for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")),
    Case("GlobalAveragePool", (X,), split=ROWS, note="split along rows"),
    Case("GlobalLpPool", (X,), {"p": 1}, note="p"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_computes_what_onnx_says(case):
    check(case)


@pytest.mark.parametrize(
    ("op", "attributes", "message"),
    [
        ("MaxPool", {"kernel_shape": [1 << 40, 1], "dilations": [2, 1]}, "more than 4096 elements"),
        ("AveragePool", {**SQUARE, "pads": [1 << 40] * 4}, "the windows are .* more than"),
    ],
)
def test_numbers_that_would_fill_the_memory_are_refused(op, attributes, message):
    with pytest.raises(ModelError, match=message):
        jitted(Case(op, (X,), attributes))


def test_an_image_is_wanted():
    with pytest.raises(ModelError, match=r"\(batch, channels, spatial\.\.\) is wanted, and"):
        jitted(Case("GlobalMaxPool", (floats(2, 3),)))
