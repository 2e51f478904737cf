"""The rules of operators, by family; importing this registers them."""

if __name__ != "isoshard.onnx_bridge.checking.operators":
    raise ImportError(f"import isoshard.onnx_bridge.checking.operators, not {__name__}")

from ..factors import rule_of
from . import elementwise, movement, products, reductions, windows

__all__ = ["elementwise", "movement", "products", "reductions", "rule_of", "windows"]
