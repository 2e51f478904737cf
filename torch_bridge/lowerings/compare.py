"""Comparisons, element by element, of operands in their common dtype.

>>> from isoshard.torch_bridge.lowerings import registry
>>> registry.find(torch.ops.aten.ge.Scalar).function(jnp.array([1.0, jnp.nan, 3.0]), 2.0)
Array([False, False,  True], dtype=bool)

Thresholds are lifted, so one that moves from step to step costs no new program.
"""

from __future__ import annotations

import jax.numpy as jnp
import torch  # noqa: F401  (for the doctest)

from .registry import lower

_COMPARISONS = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}

for _name, _function in _COMPARISONS.items():
    lower(f"aten::{_name}.Tensor", f"aten::{_name}.Scalar", promote="inputs", lift=("other",))(
        _function
    )
