"""Arithmetic width: where torch computes half-precision tensors in float32, so do we.

Softmax, norms, losses and smooth activations of a bfloat16 tensor are computed by torch in float32
and rounded once at the end. float32 and wider pass through untouched, so their compiled program is
what one would write by hand.

>>> print(*(x.dtype for x in wide_all(jnp.ones(2, "bfloat16"), None, jnp.ones(2)) if x is not None))
float32 float32
>>> widely(lambda x: x.dtype)(jnp.ones(2, "float16"))
dtype('float32')
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .argument_forms import wide


def wide_all(*arrays: Any) -> tuple[Any, ...]:
    """The arrays in the one dtype that torch would compute in; None stays None."""
    widened = [wide(x) for x in arrays if x is not None]
    dtype = functools.reduce(jnp.promote_types, [x.dtype for x in widened])
    return tuple(None if x is None else x.astype(dtype) for x in arrays)


def widely(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hand the array arguments to `function` in the dtype that torch would compute in."""

    @functools.wraps(function)
    def widened(*args: Any, **kwargs: Any) -> Any:
        return function(*(wide(a) if isinstance(a, jax.Array) else a for a in args), **kwargs)

    return widened
