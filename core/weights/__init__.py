"""Weights: from one framework's names and axes to another's, and from files straight to shards."""

if __name__ != "isoshard.core.weights":
    raise ImportError(f"import isoshard.core.weights, not {__name__}")

from .joining import Concat, Split
from .loading import load_safetensors
from .ops import Kernel, Op, Transpose, TransposedKernel
from .reshaping import MergeAxes, SplitAxis
from .safetensors_writing import save_safetensors
from .standard_layers import attention, flax_names, linen_names
from .verify import Agreement, verify
from .weight_errors import FileFormatError, WeightError
from .weight_map import WeightMap
from .weight_rules import Rule

__all__ = [
    "Agreement",
    "Concat",
    "FileFormatError",
    "Kernel",
    "MergeAxes",
    "Op",
    "Rule",
    "Split",
    "SplitAxis",
    "Transpose",
    "TransposedKernel",
    "WeightError",
    "WeightMap",
    "attention",
    "flax_names",
    "linen_names",
    "load_safetensors",
    "save_safetensors",
    "verify",
]
