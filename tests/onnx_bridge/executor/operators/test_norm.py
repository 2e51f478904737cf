"""Normalisations and dropout."""

import ml_dtypes
import numpy as np

from tests.onnx_bridge.executor.operators.one_node import (
    Case,
    check,
    check_refused,
    floats,
    jitted,
    positive,
)

X = floats(8, 4, 5)
CHANNEL = (positive(4), floats(4))
ROWS = {0: 0}
RUNNING = (floats(4), positive(4))
HALF = X.astype(np.float16)

CASES = [
    Case("BatchNormalization", (X, *CHANNEL, *RUNNING), split=ROWS),
    Case("BatchNormalization", (X, *CHANNEL, *RUNNING), {"epsilon": 0.1}, opset=9, note="epsilon"),
    Case("BatchNormalization", (X, *CHANNEL, *RUNNING), {"training_mode": 1, "momentum": 0.7},
         opset=15, outputs=3, split=ROWS, note="training", oracle="reference"),
    Case("BatchNormalization", (floats(8, 4), *CHANNEL, *RUNNING), note="no image"),
    Case("InstanceNormalization", (X, *CHANNEL), split=ROWS, tolerance=1e-4),
    Case("LayerNormalization", (X, positive(5), floats(5)), outputs=3, split=ROWS),
    Case("LayerNormalization", (X, positive(4, 5)), {"axis": 1}, opset=17, note="axis, no bias"),
    Case("LayerNormalization", (HALF, HALF[0, 0], HALF[1, 0]), {"epsilon": 1e-3}, note="float16",
         tolerance=2e-3, oracle="reference"),
    Case("GroupNormalization", (X, *CHANNEL), {"num_groups": 2}, split=ROWS, oracle="reference",
         tolerance=1e-4),
    Case("GroupNormalization", (X, positive(2), floats(2)), {"num_groups": 2}, opset=18,
         oracle="reference", note="by group", tolerance=1e-4),
    Case("RMSNormalization", (X, positive(5)), opset=23, split=ROWS, oracle="reference"),
    Case("RMSNormalization", (X, positive(4, 5)), {"axis": -2, "epsilon": 0.1}, opset=23,
         oracle="reference", note="axis"),
    Case("LpNormalization", (X,), split=ROWS),
    Case("LpNormalization", (X,), {"p": 1, "axis": 1}, note="p"),
    Case("LpNormalization", (X * 0,), opset=22, oracle=lambda x: x, note="zeros", gradient=True),
    Case("LRN", (floats(8, 6, 3, 3),), {"size": 3, "alpha": 0.1, "bias": 2.0}, split=ROWS),
    Case("LRN", (floats(6, 6, 3, 3),), {"size": 4}, note="even size", oracle="reference"),
    Case("Dropout", (X,), outputs=2, split=ROWS),
    Case("Dropout", (X, np.float32(0.7), np.array(False)), {}, (1, 2), opset=13, note="inference"),
    Case("Dropout", (X,), {"ratio": 0.3}, opset=10, note="attribute"),
]  # fmt: skip


def test_they_compute_what_onnx_says():
    check(CASES)


REFUSED = [
    (Case("Dropout", (X, np.float32(0.5), np.array(True)), {}, (1, 2)),
     r"in training mode, which draws .* module\.eval\(\)"),
    (Case("GroupNormalization", (X, *CHANNEL), {"num_groups": 3}),
     "num_groups=3 does not divide 4 channels"),
]  # fmt: skip


def test_what_cannot_be_computed_raises():
    check_refused(REFUSED)


def test_statistics_of_bfloat16_are_computed_in_float32():
    x = (100 + floats(2, 512)).astype(ml_dtypes.bfloat16)
    ones = np.ones(512, ml_dtypes.bfloat16)
    y, mean, _ = jitted(Case("LayerNormalization", (x, ones), outputs=3))
    assert (y.dtype, mean.dtype) == (ml_dtypes.bfloat16, np.float32)
    np.testing.assert_allclose(mean, np.asarray(x, np.float64).mean(1, keepdims=True), rtol=1e-5)
