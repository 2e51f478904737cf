"""Checking annotated models: structure, the formalism's rules per operator, implied traffic."""

if __name__ != "isoshard.onnx_bridge.checking":
    raise ImportError(f"import isoshard.onnx_bridge.checking, not {__name__}")

from .findings import RULES, Finding, FindingRule
from .validating import validate

__all__ = ["RULES", "Finding", "FindingRule", "validate"]
