"""Weights: from one framework's names and axes to another's, and from files straight to shards."""

if __name__ != "isoshard.core.weights":
    raise ImportError(f"import isoshard.core.weights, not {__name__}")

from .errors import FileFormatError, WeightError
from .joining import Concat, Split
from .loading import load_safetensors
from .ops import Kernel, Op, Transpose
from .presets import attention, flax_names, linen_names
from .reshaping import MergeAxes, SplitAxis
from .rules import Rule
from .saving import save_safetensors
from .verify import Agreement, verify
from .weight_map import WeightMap

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
    "WeightError",
    "WeightMap",
    "attention",
    "flax_names",
    "linen_names",
    "load_safetensors",
    "save_safetensors",
    "verify",
]
