"""The rules of operators, by family; importing this registers them."""

if __name__ != "isoshard.onnx_bridge.checking.operator_rules":
    raise ImportError(f"import isoshard.onnx_bridge.checking.operator_rules, not {__name__}")

from isoshard.onnx_bridge.checking.factors import rule_of

from . import (
    elementwise_factors,
    movement_factors,
    product_factors,
    reduction_factors,
    window_factors,
)

__all__ = [
    "elementwise_factors",
    "movement_factors",
    "product_factors",
    "reduction_factors",
    "rule_of",
    "window_factors",
]
