"""Operators that make tensors or change their dtype."""

import jax
import ml_dtypes
import numpy as np
from onnx import TensorProto, helper, numpy_helper

from tests.onnx_bridge.executor.operators.one_node import (
    Case,
    check,
    check_refused,
    floats,
    integers,
    ints,
    jitted,
)

X = floats(8, 3) * 3
ROWS = {0: 0}
BF16 = X.astype(ml_dtypes.bfloat16)
ALL = (0, 1, 2)


def tensor(values, dtype):
    return numpy_helper.from_array(np.array(values, dtype))


def cast(x, to, opset=21, **more):
    return Case("Cast", (x,), {"to": to}, opset=opset, oracle="reference", **more)


CASES = [
    Case("Constant", (), {"value": tensor([1, 2], np.int64)}),
    Case("Constant", (), {"value_float": 0.5}),
    Case("Constant", (), {"value_floats": [0.5, 1.5]}),
    Case("Constant", (), {"value_int": -3}),
    Case("Constant", (), {"value_ints": [1, 2]}, opset=13),
    Case("ConstantOfShape", (ints(2, 3),), known=(0,)),
    Case("ConstantOfShape", (ints(2, 3),), {"value": tensor([7], np.int64)}, (0,), note="ints"),
    Case("ConstantOfShape", (ints(300, 300),), {"value": tensor([0.5], np.float32)}, (0,), oracle=(
        lambda shape: np.full((300, 300), 0.5, np.float32)), note="large"),
    Case("Range", (np.int64(3), np.int64(12), np.int64(4)), known=ALL),
    Case("Range", (np.int64(9), np.int64(-2), np.int64(-3)), known=ALL, note="down"),
    Case("Range", (np.int64(9), np.int64(2), np.int64(3)), known=ALL, note="empty"),
    Case("Range", (np.float32(0), np.float32(1), np.float32(0.3)), known=ALL, note="floats"),
    Case("EyeLike", (X,), {"k": 1}, split=ROWS),
    Case("EyeLike", (X,), {"dtype": TensorProto.INT32, "k": -1}, opset=13, note="int32"),
    Case("Trilu", (floats(8, 4, 5),), split=ROWS),
    Case("Trilu", (floats(8, 8), np.int64(-1)), {"upper": 0}, split=ROWS, note="lower"),
    Case("Trilu", (integers(3, 4), np.int64(1)), known=(1,), note="integers"),
    Case("OneHot", (integers(8, low=-4, high=4), np.int64(4), np.array([-1, 2], np.float32)),
         known=(1,), split=ROWS),
    Case("OneHot", (integers(8, 2, high=9), ints(4), np.array([0, 1], np.int64)), {"axis": 1},
         (1,), note="axis 1, out of range"),
    Case("OneHot", (np.array([0.0, 2.0], np.float32), np.int64(3), np.array([0, 1], np.float32)),
         {"axis": 0}, (1,), opset=11, note="float indices", oracle="reference"),
    cast(X, TensorProto.INT64, split=ROWS),
    *(cast(X, to, opset) for to in (TensorProto.INT32, TensorProto.BOOL) for opset in (13, 23)),
    cast(X, TensorProto.FLOAT16, note="float16"),
    cast(X, TensorProto.BFLOAT16, note="to bfloat16"),
    cast(BF16, TensorProto.FLOAT, note="from bfloat16"),
    cast(X > 0, TensorProto.FLOAT, note="from bool"),
    cast(integers(8, 3), TensorProto.FLOAT, note="from int64"),
    cast(X * 1000, TensorProto.FLOAT8E4M3FN, note="saturating"),
    Case("CastLike", (X, np.array([1], np.int32)), split=ROWS, oracle="reference"),
    Case("CastLike", (X, BF16[0]), opset=19, oracle="reference", note="bfloat16"),
]  # fmt: skip


def test_they_compute_what_onnx_says():
    check(CASES)


SPARSE = helper.make_sparse_tensor(tensor([1.0], np.float32), tensor([0], np.int64), [3])
REFUSED = [
    (Case("Cast", (X,), {"to": TensorProto.STRING}), "type STRING have no counterpart in JAX"),
    (Case("Cast", (X,), {"to": TensorProto.DOUBLE}), "float64 would lose precision, as jax_en"),
    (Case("Constant", (), {"value_string": "a"}), "the constant is strings"),
    (Case("Constant", (), {"sparse_value": SPARSE}), "the constant is a sparse tensor"),
    (Case("Range", (np.int64(0), np.int64(5), np.int64(0)), known=ALL), "the delta of Range is 0"),
    (Case("Range", (np.int64(0), np.int64(5), np.int64(1))), "'x0' .start. becomes a shape"),
    (Case("OneHot", (ints(1), ints(1, 2), ints(0, 1)), {}, (1,)), "depth has shape"),
    (Case("Add", (integers(2), np.array([1 << 40], np.int64)), known=(1,)),
     "x1: int64 is stored as int32 .* do not fit"),
]  # fmt: skip


def test_what_cannot_be_computed_raises():
    check_refused(REFUSED)


def test_with_64_bit_types_nothing_is_narrowed(x64):
    large = np.array([1 << 40], np.int64)
    (found,) = jitted(Case("Add", (large, large), known=(1,)))
    assert (found.dtype, found.item()) == (np.dtype("int64"), 1 << 41)
    (found,) = jitted(Case("Cast", (X,), {"to": TensorProto.DOUBLE}))
    assert found.dtype == jax.numpy.float64
