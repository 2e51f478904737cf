"""Weights of one framework's model as those of another's: rules, presets, and a comparison.

>>> import numpy as np
>>> from isoshard import weights
>>> rules = weights.flax_names({"encoder.{i}": "layers.{i}"})
>>> like = {"layers": [{"kernel": np.zeros((4, 8))}]}
>>> rules.apply({"encoder.0.weight": np.ones((8, 4))}, like=like)["layers"][0]["kernel"].shape
(4, 8)
"""

from isoshard.core.weights import (
    Agreement,
    Concat,
    FileFormatError,
    Kernel,
    MergeAxes,
    Op,
    Rule,
    Split,
    SplitAxis,
    Transpose,
    WeightError,
    WeightMap,
    attention,
    flax_names,
    linen_names,
    load_safetensors,
    save_safetensors,
    verify,
)

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
