"""Operators of two or more inputs: broadcast, and matrix products."""

import numpy as np

from tests.onnx_bridge.executor.operators.one_node import (
    Case,
    check,
    check_refused,
    floats,
    integers,
    positive,
)

A, B, ROW = floats(8, 3), floats(8, 3), floats(3)
N, J = integers(8, 3), np.where(integers(8, 3) == 0, 3, integers(8, 3, low=1))
SIGNED = J * np.array([1, -1, 1])
BITS = integers(8, 3, low=0, high=9, dtype=np.uint8)
LEFT, RIGHT, BIAS = floats(8, 16), floats(16, 8), floats(8)
ROWS, BOTH = {0: 0}, {0: 0, 1: 0}

CASES = [
    *(Case(op, (A, ROW), split=ROWS) for op in ("Add", "Sub", "Mul")),
    *(Case(op, (N, SIGNED)) for op in ("Add", "Sub", "Mul")),
    Case("Add", (A, B), opset=13, split={1: 0}, note="another layout each"),
    Case("Add", (floats(8, 1), floats(1, 8)), split={0: 0, 1: 1}, note="outer, both split"),
    Case("Div", (A, positive(3)), split=ROWS),
    Case("Div", (N, SIGNED), split=BOTH, note="towards zero"),
    Case("Mod", (N, SIGNED), split=BOTH, note="sign of the divisor"),
    Case("Mod", (N, SIGNED), {"fmod": 1}, note="sign of the dividend"),
    Case("Mod", (A * 5, B), {"fmod": 1}, split=BOTH, note="floats"),
    Case("Pow", (positive(8, 3), ROW), split=ROWS),
    Case("Pow", (A, np.float32(2)), known=(1,), note="known square"),
    Case("Pow", (A, np.float32(3)), note="unknown cube", gradient=False),
    Case("Pow", (A, np.int64(3)), note="integer exponent", gradient=False),
    Case("Pow", (N, np.int64(2)), note="integers"),
    Case("Pow", (positive(8, 3), np.float32(-0.5)), known=(1,), note="known root"),
    *(
        Case(op, (N, J[0]), split=ROWS)
        for op in ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")
    ),
    *(Case(op, (A > 0, B > 0), split=BOTH) for op in ("And", "Or", "Xor")),
    *(Case(op, (BITS, BITS[0]), split=ROWS) for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")),
    Case("BitShift", (BITS, np.uint8(2)), {"direction": "LEFT"}, split=ROWS),
    Case("BitShift", (BITS, np.uint8(2)), {"direction": "RIGHT"}, note="right"),
    *(Case(op, (A, B, ROW), split=BOTH) for op in ("Sum", "Max", "Min", "Mean")),
    *(Case(op, (A,), note="one") for op in ("Max", "Mean")),
    *(Case(op, (N, J)) for op in ("Max", "Min")),
    Case("Where", (A > 0, B, ROW), split=BOTH),
    Case("Where", (A[0] > 0, N, J), note="integers"),
    Case("PRelu", (A, ROW), split=ROWS),
    Case("MatMul", (LEFT, RIGHT), split=ROWS),
    Case("MatMul", (LEFT, RIGHT), split={0: 1, 1: 0}, note="contracted axis split"),
    Case("MatMul", (floats(8, 2, 3, 4), floats(2, 4, 5)), split=ROWS, note="stacks"),
    Case("MatMul", (floats(4), floats(4, 3)), note="a vector"),
    Case("MatMul", (floats(8, 4), floats(4)), note="times a vector"),
    Case("MatMul", (integers(3, 4, dtype=np.int32), integers(4, 2, dtype=np.int32)), note="int32"),
    Case("Gemm", (LEFT, RIGHT, BIAS), split={0: 0, 2: 0}),
    Case("Gemm", (LEFT, RIGHT), note="without BIAS"),
    Case("Gemm", (LEFT, RIGHT, BIAS), {"alpha": 0.5, "beta": 2.0}, opset=13, note="scaled"),
    Case(
        "Gemm", (RIGHT, LEFT, floats(8, 1)), {"transA": 1, "transB": 1}, split={0: 1}, note="turned"
    ),
    Case("Gemm", (LEFT, RIGHT, floats(1)), {"beta": 0.0}, opset=11, note="BIAS unused"),
    Case("Det", (floats(8, 3, 3),), split=ROWS),
    Case("Det", (floats(4, 4),), opset=11, note="a matrix"),
    Case("Einsum", (LEFT, RIGHT), {"equation": "ij, jk -> ik"}, split=ROWS),
    Case("Einsum", (floats(8, 2, 3), floats(3, 4)), {"equation": "...i,ij"}, note="implicit"),
    Case("Einsum", (floats(4, 4),), {"equation": "ii->i"}, opset=13, note="diagonal"),
]


def test_they_compute_what_onnx_says():
    check(CASES)


REFUSED = [
    (Case("Mod", (A, B)), "Mod of float32 has fmod=0, which is for integers"),
    (Case("Add", (A, floats(5))), r"node 'Add_0' \(Add\): .*shapes"),
]  # fmt: skip


def test_what_cannot_be_computed_raises():
    check_refused(REFUSED)
