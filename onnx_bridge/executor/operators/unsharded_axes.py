"""Axes that must be unsharded for XLA's partitioner.

A running sum, and a convolution that is dilated, grouped, transposed or whose kernel is split, come
out wrong where XLA splits them along such an axis. Their functions ask for the axes that they need
whole, forward and backward; the others are unchanged. Which devices a program runs on is
said around its evaluation:

>>> x = jax.numpy.ones((2, 3))
>>> unsharded(x, [1]) is x                           # no mesh, nothing to do
True
>>> with on_mesh(jax.sharding.Mesh(np.array(jax.devices()), ("x",))):
...     jax.jit(lambda x: unsharded(x, [1]))(x).shape
(2, 3)
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isoshard.core.kit import constrain

_MESH: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)


@contextlib.contextmanager
def on_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Say which mesh the operators evaluated inside are compiled for.

    Args:
        mesh: with Auto axes; None for one device.
    """
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def unsharded(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The array with some axes on every device unsplit."""
    mesh = _MESH.get()
    if mesh is None or mesh.size == 1 or not len(axes):
        return x
    spec: list[object] = [PartitionSpec.UNCONSTRAINED] * np.ndim(x)
    for axis in axes:
        spec[axis] = None
    return constrain(x, NamedSharding(mesh, PartitionSpec(*spec)))
