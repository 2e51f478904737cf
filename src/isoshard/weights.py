"""Weights of one framework's model as those of another's: rules, presets, and a comparison.

>>> import numpy as np
>>> from isoshard import weights
>>> rules = weights.flax_names({"encoder.{i}": "layers.{i}"})
>>> like = {"layers": [{"kernel": np.zeros((4, 8))}]}
>>> rules.apply({"encoder.0.weight": np.ones((8, 4))}, like=like)["layers"][0]["kernel"].shape
(4, 8)
"""

from isoshard.core import weights as _weights
from isoshard.core.weights import *  # noqa: F403 (the one list is that of core)

__all__: list[str] = []
__all__ += _weights.__all__


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
