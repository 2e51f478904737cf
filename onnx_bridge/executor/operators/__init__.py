"""ONNX operators as JAX functions, a module per family, in one table."""

if __name__ != "isoshard.onnx_bridge.executor.operators":
    raise ImportError(f"import isoshard.onnx_bridge.executor.operators, not {__name__}")

from . import (
    activation,
    arithmetic,
    attention,
    conv,
    create,
    elementwise,
    index,
    norm,
    pad,
    pool,
    reduce,
    resize,
    shape,
)
from .registry import Operator, entries, find, operator
from .unsharded_axes import on_mesh

__all__ = [
    "Operator",
    "activation",
    "arithmetic",
    "attention",
    "conv",
    "create",
    "elementwise",
    "entries",
    "find",
    "index",
    "norm",
    "on_mesh",
    "operator",
    "pad",
    "pool",
    "reduce",
    "resize",
    "shape",
]
