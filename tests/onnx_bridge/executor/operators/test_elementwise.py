"""Operators of one input, element by element."""

import numpy as np

from tests.onnx_bridge.executor.operators.one_node import Case, check, floats, integers, positive

X = floats(8, 3)
UNIT = np.tanh(X)
SPECIAL = np.array([[np.nan, np.inf, -np.inf, 1.0]] * 8, np.float32)
HALVES = np.array([[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]] * 8, np.float32)
ROWS = {0: 0}

CASES = [
    *(
        Case(op, (X,), split=ROWS)
        for op in ("Exp", "Erf", "Sin", "Cos", "Tan", "Sinh", "Cosh", "Asinh", "Atan", "Identity")
    ),
    *(Case(op, (UNIT * 0.9,), split=ROWS) for op in ("Asin", "Acos", "Atanh")),
    *(Case(op, (positive(8, 3),), split=ROWS) for op in ("Log", "Sqrt", "Reciprocal")),
    Case("Acosh", (positive(8, 3) + 1,), split=ROWS),
    *(Case(op, (X * 3,), split=ROWS) for op in ("Abs", "Neg", "Sign", "Floor", "Ceil")),
    Case("Round", (HALVES,), split=ROWS, note="half to even"),
    *(Case(op, (integers(8, 3),), opset=13) for op in ("Abs", "Neg", "Sign", "Identity")),
    Case("Not", (X > 0,), split=ROWS),
    Case("BitwiseNot", (integers(8, 3, dtype=np.int32),), split=ROWS),
    Case("IsNaN", (SPECIAL,), split=ROWS),
    Case("IsInf", (SPECIAL,), split=ROWS),
    Case("IsInf", (SPECIAL,), {"detect_negative": 0}, note="positive"),
    Case("IsInf", (SPECIAL,), {"detect_positive": 0}, note="negative"),
    Case("Clip", (X, np.float32(-0.5), np.float32(0.5)), split=ROWS),
    Case("Clip", (X, None, np.float32(0.5)), note="no lower bound"),
    Case("Clip", (X, np.float32(0.5)), opset=12, note="no upper bound"),
    Case("Clip", (X, np.float32(1), np.float32(-1)), oracle="reference", note="bounds cross"),
    Case("Clip", (integers(8, 3), np.int64(-2), np.int64(2)), note="integers"),
    Case("Clip", (X,), {"min": -0.5, "max": 0.5}, opset=10, note="attributes"),
    Case("Clip", (X,), {"max": 0.5}, opset=10, note="one attribute"),
]


def test_they_compute_what_onnx_says():
    check(CASES)
