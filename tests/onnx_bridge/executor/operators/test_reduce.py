"""Reductions, places of extremes, running sums, sorting."""

import numpy as np
import pytest

from tests.onnx_bridge.executor.operators.one_node import (
    Case,
    check,
    check_refused,
    floats,
    integers,
    ints,
    jitted,
    positive,
)

X, P, I = positive(8, 3, 4), floats(8, 3, 4), integers(8, 3)  # noqa: E741
ROWS = {0: 0}
REDUCTIONS = [
    f"Reduce{what}"
    for what in (
        "Sum",
        "Mean",
        "Max",
        "Min",
        "Prod",
        "L1",
        "L2",
        "SumSquare",
        "LogSum",
        "LogSumExp",
    )
]
TIES = np.array([[1.0, 3.0, 3.0, -2.0, 3.0, -2.0]] * 8, np.float32)

CASES = [
    *(Case(op, (X, ints(0, -1)), known=(1,), split=ROWS) for op in REDUCTIONS),
    *(
        Case(op, (X,), {"axes": [-1, 1], "keepdims": 0}, opset=11 if op == "ReduceSum" else 13,
             note="attribute")
        for op in REDUCTIONS
    ),
    *(
        Case(op, (X, ints()), {"noop_with_empty_axes": 1}, (1,), note="none")
        for op in ("ReduceSum", "ReduceMax", "ReduceMean", "ReduceProd")
    ),
    *(
        Case(op, (I, ints(1)), {"keepdims": 0}, (1,), note="integers")
        for op in ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")
    ),
    Case("ReduceMean", (np.array([[-7, 2], [5, 4]], np.int32), ints(1)), known=(1,),
         note="integers"),
    Case("ReduceMax", (P[0] > 0, ints(1)), {}, (1,), opset=20, note="bool", oracle="reference"),
    Case("ReduceLogSumExp", (P * 60, ints(2)), {}, (1,), split=ROWS, note="large"),
    *(Case(op, (P,), {"axis": 1}, split=ROWS) for op in ("ArgMax", "ArgMin")),
    *(
        Case(op, (TIES,), {"axis": -1, "keepdims": 0, "select_last_index": last}, split={0: 0},
             note=f"ties {last}")
        for op in ("ArgMax", "ArgMin")
        for last in (0, 1)
    ),
    Case("ArgMax", (P,), split=ROWS, note="the split axis"),
    Case("CumSum", (P, np.int64(0)), known=(1,), split=ROWS),
    Case("CumSum", (P, np.int64(-2)), {"exclusive": 1}, (1,), split=ROWS, note="exclusive"),
    Case("CumSum", (I, np.int64(0)), {"reverse": 1, "exclusive": 1}, (1,), note="both"),
    Case("TopK", (P, ints(2)), {"axis": 1}, (1,), outputs=2, split=ROWS),
    Case("TopK", (TIES, ints(4)), {"largest": 0}, (1,), outputs=2, note="smallest, ties"),
    Case("TopK", (I, ints(2)), {"largest": 0, "axis": 0}, (1,), outputs=2, split=ROWS,
         note="smallest integers"),
    Case("TopK", (P, ints(3)), {"axis": 2}, (1,), outputs=2, opset=10),
    Case("TopK", (P,), {"axis": 2, "k": 3}, outputs=2, opset=9),
]  # fmt: skip


def test_they_compute_what_onnx_says():
    check(CASES)


REFUSED = [
    (Case("ReduceSum", (X, ints(1))), r"its input 'x1' \(axes\) becomes a shape or an axis"),
    (Case("ReduceSum", (X, ints(1, -2)), known=(1,)), r"axes \[1, -2\] of rank 3 name an axis tw"),
]  # fmt: skip


def test_what_cannot_be_computed_raises():
    check_refused(REFUSED)


def test_the_maximum_of_nothing_is_the_lowest_number():
    (found,) = jitted(Case("ReduceMax", (np.zeros((2, 0), np.float32), ints(1)), known=(1,)))
    assert np.isneginf(found).all()


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean"])
def test_halves_are_added_as_floats(op):
    x = np.array([2048, *[1] * 8, -2048], np.float16)
    (got,) = jitted(Case(op, (x,), {"keepdims": 0}))
    np.testing.assert_allclose(np.float64(got), 8 if op == "ReduceSum" else 0.8, rtol=2**-11)
