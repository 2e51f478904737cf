"""Arrays of tensors that somebody gave away, which only a read can tell.

>>> import jax, torch, isoshard as iso, isoshard.torch_bridge
>>> t = torch.ones(8, device="jax")
>>> _ = jax.jit(lambda x: x + 1, donate_argnums=0)(iso.to_jax(t))
>>> t + 1
Traceback (most recent call last):
    ...
RuntimeError: the array behind a tensor of shape (8,) was donated: a jax.jit(.., donate_argnums=..) was given iso.to_jax(tensor), and has written over it. Go on with what that call returned, or donate a copy: iso.to_jax(tensor, copy=True)
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax


def error(shape: tuple[int, ...]) -> RuntimeError:
    """The error of reading a tensor whose array was donated.

    Args:
        shape: of the array.
    """
    return RuntimeError(
        f"the array behind a tensor of shape {shape} was donated: a jax.jit(.., donate_argnums=..) "
        "was given iso.to_jax(tensor), and has written over it. Go on with what that call "
        "returned, or donate a copy: iso.to_jax(tensor, copy=True)"
    )


def gone(arrays: Iterable[Any]) -> jax.Array | None:
    """The first of some arrays that was donated."""
    return next((x for x in arrays if isinstance(x, jax.Array) and x.is_deleted()), None)
