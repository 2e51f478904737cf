"""Activations and softmax."""

import numpy as np

from tests.onnx_bridge.executor.operators.one_node import Case, check, check_refused, floats

X = floats(8, 3, 4)
LARGE = np.array([[-200.0, -1.0, 0.0, 1.0, 200.0]] * 8, np.float32)
ROWS, LAST = {0: 0}, {0: 2}
WIDE = floats(2, 3, 8)

CASES = [
    *(
        Case(op, (X,), split=ROWS)
        for op in ("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "HardSwish", "Mish")
    ),
    *(
        Case(op, (X,), attributes, split=ROWS)
        for op, attributes in (
            ("LeakyRelu", {"alpha": 0.2}),
            ("ThresholdedRelu", {"alpha": 0.3}),
            ("Elu", {"alpha": 2.0}),
            ("Selu", {"alpha": 1.5, "gamma": 1.2}),
            ("Celu", {"alpha": 0.7}),
            ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}),
            ("Shrink", {"lambd": 0.4, "bias": 0.2}),
            ("Gelu", {}),
        )
    ),
    *(
        Case(op, (LARGE,), note="large", gradient=True)
        for op in ("Elu", "Selu", "Celu", "Softplus", "Gelu")
    ),
    Case("Gelu", (X,), {"approximate": "tanh"}, note="tanh"),
    Case("Gelu", (X,), opset=20),
    Case("Swish", (X,), {"alpha": 0.5}, opset=24, split=ROWS, oracle="reference"),
    Case("Relu", (np.array([-3, 4], np.int32),), opset=14, note="integers"),
    *(
        Case(op, (WIDE,), attributes, opset=opset, split=split, note=note)
        for op in ("Softmax", "LogSoftmax", "Hardmax")
        for opset, attributes, split, note in (
            (13, {}, LAST, "last axis, split"),
            (13, {"axis": 1}, LAST, "axis 1"),
            (11, {"axis": 2}, None, "flattened from 2"),
        )
    ),
]


def test_they_compute_what_onnx_says():
    check(CASES)


REFUSED = [
    (Case("Gelu", (X,), {"approximate": "erf"}), "is 'erf'; possible are 'none', 'tanh'"),
    (Case("Softmax", (X,), {"axis": 3}), r"axis 3 of a tensor of rank 3: -3\.\.2 are there"),
]  # fmt: skip


def test_what_cannot_be_computed_raises():
    check_refused(REFUSED)
