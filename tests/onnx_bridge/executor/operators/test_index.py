"""Gather and scatter."""

import numpy as np

from tests.onnx_bridge.executor.operators.one_node import (
    Case,
    check,
    check_refused,
    floats,
    integers,
    ints,
    jitted,
)

X = floats(8, 5, 4)
ROWS = {0: 0}
ALL = {0: 0, 1: 0, 2: 0}
IDS = integers(8, 3, low=-5, high=5)
DISTINCT = np.argsort(floats(8, 5, 2), axis=1)[:, :3]

CASES = [
    Case("Gather", (X, IDS), {"axis": 1}, split=ROWS),
    Case("Gather", (X, IDS), {"axis": -2}, split={1: 0}, note="indices split"),
    Case("Gather", (X, integers(6, low=-8, high=8)), split=ROWS, note="along the split axis"),
    Case("Gather", (X, integers(6, low=-8, high=8)), known=(1,), split=ROWS, note="known"),
    Case("Gather", (X, np.int64(-1)), {"axis": 1}, (1,), note="known number"),
    Case("Gather", (integers(7), np.int64(-2)), known=(1,), note="of a shape"),
    Case("GatherElements", (X, integers(8, 2, 4, low=-5, high=5)), {"axis": 1},
         split={0: 0, 1: 0}),
    Case("GatherElements", (X, integers(3, 5, 2, low=-8, high=8)), note="a part", opset=11),
    Case("GatherND", (X, integers(6, 2, low=-5, high=5)), split=ROWS),
    Case("GatherND", (X, integers(8, 3, 1, low=-5, high=5)), {"batch_dims": 1},
         split={0: 0, 1: 0}, note="batch"),
    Case("ScatterElements", (X, DISTINCT[..., None][..., 0, :], floats(8, 3, 1)), {"axis": 1},
         split=ALL),
    Case("ScatterElements", (X, DISTINCT[..., :1] - 5, floats(8, 3, 1)), {"axis": -2}, opset=13,
         note="negative"),
    *(
        Case("ScatterElements", (X, integers(8, 3, 4, high=5), floats(8, 3, 4)),
             {"axis": 1, "reduction": reduction}, opset=18, split=ALL, note=reduction,
             gradient=reduction == "add")
        for reduction in ("add", "max")
    ),
    Case("ScatterElements", (floats(8), ints(-1), floats(1)), split=ROWS, note="single"),
    Case("ScatterND", (X, np.array([[[1, 2], [3, 0]]]), floats(1, 2, 4)), split=ROWS),
    Case("ScatterND", (X, np.array([[-1, 2]]), floats(1, 4)), split=ROWS, note="single"),
    Case("ScatterND", (X, np.array([[-1, 2]]), floats(1, 4)), {"reduction": "add"}, split=ROWS,
         opset=18, note="single add"),
    *(
        Case("ScatterND", (X, integers(6, 2, low=0, high=2), floats(6, 4)),
             {"reduction": reduction}, split=ROWS, note=reduction, gradient=False)
        for reduction in ("mul", "min")
    ),
    Case("Compress", (X, np.array([1, 0, 1], bool)), {"axis": 1}, (1,), split=ROWS),
    Case("Compress", (X, np.array([0, 1, 1], bool)), known=(1,), note="flat"),
    Case("ReverseSequence", (floats(4, 8, 2), integers(8, low=1, high=5)), split={0: 1, 1: 0}),
    Case("ReverseSequence", (floats(8, 4, 2), integers(8, low=1, high=5)),
         {"batch_axis": 0, "time_axis": 1}, note="batch first"),
    Case("TensorScatter", (floats(8, 2, 6, 3), floats(8, 2, 2, 3), integers(8, low=0, high=5)),
         opset=24, split=ALL, oracle="reference"),
    Case("TensorScatter", (floats(8, 6, 3), floats(8, 2, 3), integers(8, low=0, high=6)),
         {"axis": 1, "mode": "circular"}, opset=24, oracle="reference", note="circular"),
    Case("TensorScatter", (floats(2, 6, 3), floats(2, 2, 3)), opset=24, oracle="reference",
         note="from 0"),
]  # fmt: skip


def test_they_compute_what_onnx_says():
    check(CASES)


REFUSED = [
    (Case("NonZero", (X,)), r"NonZero makes as many columns as .* use Where"),
    (Case("GatherND", (X, integers(6, 2)), {"batch_dims": 2}), "batch_dims is 2, of tensors"),
    (Case("Gather", (X, ints(-1, 5)), {"axis": 1}, (1,)), r"-1\.\.5 leave axis 1 of size 5"),
]  # fmt: skip


def test_what_cannot_be_computed_raises():
    check_refused(REFUSED)


def test_places_of_known_values_are_known():
    x = np.array([[1, 0, 2], [0, 0, 3]])
    (found,) = jitted(Case("NonZero", (x,), known=(0,)))
    np.testing.assert_array_equal(found, np.stack(np.nonzero(x)))


def test_an_unknown_index_outside_reads_nan_and_writes_nothing():
    (found,) = jitted(Case("Gather", (floats(3), ints(7))))
    assert np.isnan(found).all()
    (found,) = jitted(Case("ScatterND", (np.zeros(3, np.float32), np.array([[7]]), floats(1))))
    assert not found.any()
