"""Convolutions and transposed convolutions."""

from tests.onnx_bridge.executor.operators.one_node import Case, check, check_refused, floats

X, W, B = floats(8, 4, 8, 7), floats(6, 4, 3, 2), floats(6)
T = floats(4, 6, 3, 2)
LINE = floats(2, 4, 8)
BATCH, ROWS, CHANNELS = {0: 0}, {0: 2}, {0: 1}
WIDE, FILTERS = floats(1, 8, 8, 7), floats(8, 8, 3, 2)
STEPS = {"strides": [2, 1], "dilations": [1, 2], "pads": [1, 0, 2, 1]}

CASES = [
    Case("Conv", (X, W, B), split=BATCH),
    Case("Conv", (X, W, B), split=ROWS, note="split along rows"),
    Case("Conv", (WIDE, FILTERS), split=CHANNELS, note="split along channels"),
    Case("Conv", (WIDE, FILTERS), split={1: 0}, note="split along filters"),
    Case("Conv", (X, W), STEPS, note="steps", opset=13),
    Case("Conv", (WIDE, floats(16, 4, 3, 2), floats(16)), {"group": 2, **STEPS}, split=ROWS,
         note="groups"),
    Case("Conv", (WIDE, floats(8, 1, 3, 3)), {"group": 8}, split=CHANNELS, note="depthwise"),
    *(
        Case("Conv", (X, W), {"auto_pad": pad, "strides": [2, 3]}, note=pad)
        for pad in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    Case("Conv", (LINE, floats(3, 4, 3)), {"kernel_shape": [3], "pads": [1, 1]}, split={0: 2},
         note="1-d"),
    Case("Conv", (floats(2, 2, 4, 4, 4), floats(3, 2, 2, 2, 2)), note="3-d"),
    Case("ConvTranspose", (X, T, B), split=BATCH),
    Case("ConvTranspose", (X, T, B), {"strides": [2, 2], "pads": [1, 0, 0, 1]}, split=ROWS,
         note="strides"),
    Case("ConvTranspose", (X, T), {"strides": [2, 3], "output_padding": [1, 2]},
         note="output padding", opset=13),
    Case("ConvTranspose", (X, T), {"dilations": [2, 1], "pads": [1, 1, 1, 1]}, note="dilations"),
    Case("ConvTranspose", (X, floats(4, 3, 3, 2), B), {"group": 2, "strides": [2, 1]},
         note="groups"),
    Case("ConvTranspose", (X, T), {"strides": [2, 2], "output_shape": [16, 13]},
         note="output shape"),
    *(
        Case("ConvTranspose", (X, T), {"strides": [2, 2], "auto_pad": pad}, note=pad)
        for pad in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    Case("ConvTranspose", (LINE, floats(4, 3, 3)), {"strides": [2]}, note="1-d"),
]  # fmt: skip


def test_they_compute_what_onnx_says():
    check(CASES)


REFUSED = [
    (Case("Conv", (X, W), {"kernel_shape": [3, 3]}), r"is \[3, 3\], and the weight's is"),
    (Case("Conv", (X, W), {"strides": [2]}), r"strides is \[2\], and 2 numbers of at least 1"),
]  # fmt: skip


def test_what_cannot_be_computed_raises():
    check_refused(REFUSED)
