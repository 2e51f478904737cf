"""Operators that only move elements."""

import numpy as np

from tests.onnx_bridge.executor.operators.one_node import (
    Case,
    check,
    check_refused,
    floats,
    integers,
    ints,
)

X = floats(8, 3, 4)
ROWS = {0: 0}
BIG = np.iinfo(np.int64).max

CASES = [
    Case("Shape", (X,), split=ROWS),
    Case("Shape", (X,), {"start": -2}, note="from -2"),
    Case("Shape", (X,), {"start": 1, "end": -1}, note="a part"),
    Case("Shape", (X,), opset=13),
    Case("Size", (X,), split=ROWS),
    Case("Reshape", (X, ints(4, -1, 2)), known=(1,), split=ROWS),
    Case("Reshape", (X, ints(0, 12)), known=(1,), opset=13, note="0 keeps"),
    Case("Reshape", (floats(0, 3), ints(3, 0)), {"allowzero": 1}, known=(1,), note="allowzero"),
    Case("Flatten", (X,), split=ROWS),
    *(Case("Flatten", (X,), {"axis": axis}, note=f"axis {axis}") for axis in (0, 2, 3, -1)),
    Case("Squeeze", (floats(8, 1, 3, 1), ints(-1)), known=(1,), split=ROWS),
    Case("Squeeze", (floats(8, 1, 3, 1),), note="all"),
    Case("Squeeze", (floats(8, 1, 3, 1),), {"axes": [1]}, opset=11, note="attribute"),
    Case("Unsqueeze", (X, ints(-1, 0)), known=(1,), split=ROWS),
    Case("Unsqueeze", (X,), {"axes": [1, -1]}, opset=11, note="attribute"),
    Case("Transpose", (X,), split=ROWS),
    Case("Transpose", (X,), {"perm": [1, 2, 0]}, split=ROWS, note="perm"),
    Case("Expand", (floats(8, 1, 4), ints(3, 1)), known=(1,), split=ROWS),
    Case("Expand", (floats(3, 1), ints(2, 1, 6)), known=(1,), note="more axes"),
    Case("Tile", (X, ints(2, 1, 3)), known=(1,), split=ROWS),
    Case("Concat", (X, floats(8, 2, 4)), {"axis": 1}, split={0: 0, 1: 0}),
    Case("Concat", (X, X), {"axis": -3}, split={0: 0, 1: 0}, note="along the split axis"),
    Case("Split", (X, ints(1, 3)), {"axis": -1}, (1,), outputs=2, split=ROWS),
    Case("Split", (X,), {"num_outputs": 3}, outputs=3, split=ROWS, note="num_outputs, uneven"),
    Case("Split", (X,), {"axis": 2, "num_outputs": 2}, opset=18, outputs=2),
    Case("Split", (X,), {"axis": 2}, opset=13, outputs=2, note="alike"),
    Case("Split", (X,), {"axis": 1, "split": [1, 2]}, opset=11, outputs=2, note="attribute"),
    Case("Slice", (X, ints(1), ints(7), ints(0), ints(2)), known=(1, 2, 3, 4), split=ROWS),
    Case("Slice", (X, ints(-1), ints(-BIG), ints(-1), ints(-1)), {}, (1, 2, 3, 4), note="back"),
    Case("Slice", (X, ints(-3, 0), ints(BIG, -1), ints(0, 2)), {}, (1, 2, 3), note="open ends"),
    Case("Slice", (X, ints(5, 1), ints(2, 9)), {}, (1, 2), note="empty"),
    Case("Slice", (X, ints(20), ints(1), ints(0), ints(-3)), {}, (1, 2, 3, 4), note="beyond"),
    Case("Slice", (X,), {"starts": [1], "ends": [3], "axes": [2]}, opset=9, note="attributes"),
    Case("DepthToSpace", (floats(8, 8, 2, 3),), {"blocksize": 2}, split=ROWS),
    Case("DepthToSpace", (floats(8, 8, 2, 3),), {"blocksize": 2, "mode": "CRD"}, note="CRD"),
    Case("SpaceToDepth", (floats(8, 2, 4, 6),), {"blocksize": 2}, split=ROWS),
    *(
        Case(op, (integers(8, 3), *rest), attributes, tuple(range(1, 1 + len(rest))), note="ints")
        for op, rest, attributes in (
            ("Transpose", (), {}),
            ("Reshape", (ints(-1),), {}),
            ("Expand", (ints(2, 8, 3),), {}),
            ("Slice", (ints(-1), ints(-9), ints(0), ints(-2)), {}),
        )
    ),
]


def test_they_compute_what_onnx_says():
    check(CASES)


REFUSED = [
    (Case("Reshape", (X, ints(8, -1))), r"'x1' \(shape\) becomes a shape or an axis, which"),
    (Case("Reshape", (floats(0, 3), ints(0, -1)), {"allowzero": 1}, (1,)),
     r"shape \[0, -1\] with allowzero=1 has a 0 and a -1"),
    (Case("Reshape", (X, ints(96, 1, 1, 0)), {}, (1,)), r"keeps an axis that \(8, 3, 4\)"),
    (Case("Squeeze", (X, ints(0)), {}, (1,)), r"axes \[0\] of shape \(8, 3, 4\) are not"),
    (Case("Unsqueeze", (X, ints(0, -5)), {}, (1,)), "name an axis twice"),
    (Case("Split", (X, ints(1, 1)), {}, (1,), outputs=2), r"sizes \[1, 1\] do not split axis 0"),
    (Case("Split", (X,), {"axis": 1}, opset=13, outputs=2), "into 2 equal shards"),
    (Case("Split", (X,), {"num_outputs": 1 << 40}, outputs=2), "and the node has 2 outputs"),
    (Case("Slice", (X, ints(0), ints(2), None, ints(0)), {}, (1, 2, 4)), "hold a 0"),
    (Case("Flatten", (X,), {"axis": 4}), r"axis 4 of a tensor of rank 3: -3\.\.3"),
]  # fmt: skip


def test_what_cannot_be_computed_raises():
    check_refused(REFUSED)
