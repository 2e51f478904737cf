"""Resizing."""

import numpy as np

from tests.onnx_bridge.executor.operators.one_node import (
    Case,
    check,
    check_refused,
    floats,
    integers,
    ints,
)

X = floats(8, 2, 6, 5)
UP = np.array([1, 1, 2, 1.6], np.float32)
DOWN = np.array([1, 1, 0.5, 0.6], np.float32)
ROWS = {0: 0}
KNOWN = (1, 2, 3)
ROI = np.array([0, 0, 0.2, -0.35, 1, 1, 0.8, 0.9], np.float32)


def resize(scales=None, sizes=None, attributes=(), opset=19, **more):
    more = {"known": KNOWN, "inputs": (X, None, scales, sizes), **more}
    return Case("Resize", attributes=dict(attributes), opset=opset, **more)


CASES = [
    *(
        resize(scales, None, {"mode": mode, "coordinate_transformation_mode": where},
               split=ROWS if where == "half_pixel" else None, note=f"{mode}, {where}, {name}")
        for mode, where, name, scales in (
            ("linear", "half_pixel", "up", UP),
            ("linear", "align_corners", "down", DOWN),
            ("linear", "asymmetric", "up", UP),
            ("cubic", "half_pixel", "down", DOWN),
            ("cubic", "pytorch_half_pixel", "up", UP),
            ("cubic", "align_corners", "up", UP),
        )
    ),
    *(
        resize(None, ints(8, 2, 9, 3), {"nearest_mode": mode,
               "coordinate_transformation_mode": where}, note=f"{mode}, {where}")
        for mode, where in (
            ("round_prefer_floor", "half_pixel"),
            ("round_prefer_ceil", "asymmetric"),
            ("floor", "half_pixel"),
            ("ceil", "asymmetric"),
        )
    ),
    resize(np.array([1, 1, 2, 3], np.float32), note="repeated", split={0: 2},
           inputs=(floats(1, 2, 8, 5), None, np.array([1, 1, 2, 3], np.float32), None)),
    resize(None, ints(8, 2, 4, 9), {"mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5},
           note="nothing outside"),
    resize(None, ints(8, 2, 5, 4), {"mode": "linear",
           "coordinate_transformation_mode": "half_pixel_symmetric"}, note="symmetric"),
    resize(None, ints(8, 2, 4, 9), {"mode": "linear", "extrapolation_value": 9.0,
           "coordinate_transformation_mode": "tf_crop_and_resize"},
           inputs=(X, ROI, None, ints(8, 2, 4, 9)), note="cropped"),
    resize(None, ints(12, 9), {"axes": [2, 3], "keep_aspect_ratio_policy": "not_larger",
           "mode": "linear"}, note="axes, not larger"),
    resize(None, ints(9, 12), {"axes": [3, 2], "keep_aspect_ratio_policy": "not_smaller"},
           note="axes, not smaller", oracle="reference"),
    *(
        resize(DOWN, None, {"mode": mode, "antialias": 1}, note=f"{mode}, smooth",
               oracle="reference")
        for mode in ("linear", "cubic")
    ),
    resize(None, ints(8, 2, 9, 9), {"mode": "linear"}, opset=11, note="opset 11",
           inputs=(X, np.zeros(0, np.float32), np.zeros(0, np.float32), ints(8, 2, 9, 9))),
    Case("Resize", (X, UP), {"mode": "linear"}, (1,), opset=10),
    Case("Resize", (X, UP), {}, (1,), opset=10, note="nearest"),
    resize(None, ints(8, 2, 12, 10), {"mode": "linear"}, note="integers", oracle="reference",
           inputs=(integers(8, 2, 6, 5, dtype=np.int32), None, None, ints(8, 2, 12, 10))),
]  # fmt: skip


def test_they_compute_what_onnx_says():
    check(CASES)


REFUSED = [
    (resize(UP, ints(8, 2, 4, 4)), "Resize wants scales or sizes, one of them"),
    (resize(None, ints(8, 2, 1 << 40, 4)), "the places of Resize are 1099511627776 numbers"),
    (Case("Resize", (X, None, np.array([1e-9], np.float32)),
          {"mode": "linear", "antialias": 1, "axes": [3]}, (2,), opset=19), "weights of Resize"),
    (resize(inputs=(X, ROI[:2], UP, None)), "roi has 2 numbers, and two per axis are 8"),
    (resize(UP[:2]), "2 scales or sizes are given for 4 axes"),
]  # fmt: skip


def test_what_cannot_be_computed_raises():
    check_refused(REFUSED)
