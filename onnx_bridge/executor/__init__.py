"""Annotated models run with JAX: operators, their evaluation, compilation for a mesh."""

if __name__ != "isoshard.onnx_bridge.executor":
    raise ImportError(f"import isoshard.onnx_bridge.executor, not {__name__}")

from .evaluating import evaluate
from .operators import operator

__all__ = ["evaluate", "operator"]
