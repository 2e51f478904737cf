"""Products of matrices."""

import numpy as np

from tests.onnx_bridge.executor.operators.one_node import Case, check, floats, integers

A, B, C = floats(8, 16), floats(16, 8), floats(8)
ROWS = {0: 0}
CASES = [
    Case("MatMul", (A, B), split=ROWS),
    Case("MatMul", (A, B), split={0: 1, 1: 0}, note="contracted axis split"),
    Case("MatMul", (floats(8, 2, 3, 4), floats(2, 4, 5)), split=ROWS, note="stacks"),
    Case("MatMul", (floats(4), floats(4, 3)), note="a vector"),
    Case("MatMul", (floats(8, 4), floats(4)), note="times a vector"),
    Case("MatMul", (integers(3, 4, dtype=np.int32), integers(4, 2, dtype=np.int32)), note="int32"),
    Case("Gemm", (A, B, C), split={0: 0, 2: 0}),
    Case("Gemm", (A, B), note="without C"),
    Case("Gemm", (A, B, C), {"alpha": 0.5, "beta": 2.0}, opset=13, note="scaled"),
    Case("Gemm", (B, A, floats(8, 1)), {"transA": 1, "transB": 1}, split={0: 1}, note="turned"),
    Case("Gemm", (A, B, floats(1)), {"beta": 0.0}, opset=11, note="C unused"),
    Case("Einsum", (A, B), {"equation": "ij, jk -> ik"}, split=ROWS),
    Case("Einsum", (floats(8, 2, 3), floats(3, 4)), {"equation": "...i,ij"}, note="implicit"),
    Case("Einsum", (floats(4, 4),), {"equation": "ii->i"}, opset=13, note="diagonal"),
]


def test_they_compute_what_onnx_says():
    check(CASES)
