"""Axes that XLA's partitioner must find whole.

Some operations cannot be split along some of their axes: a Fourier transform whose axis is split
into pieces of unequal size ends the process. The engine says with `compiling_for` over which mesh a
program is split, and a lowering asks for the axes that it needs whole; the others stay as they are.

>>> x = jax.numpy.ones((2, 3))
>>> whole(x, [1]) is x                           # no mesh, nothing to do
True
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_MESH: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)


@contextlib.contextmanager
def compiling_for(mesh: Mesh | None) -> Iterator[None]:
    """Say over which mesh the program being compiled is split; None if it is not."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def on_a_mesh() -> bool:
    """Whether the program being compiled is split over several devices."""
    mesh = _MESH.get()
    return mesh is not None and mesh.size > 1


def whole(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The array with `axes` on every device as a whole; negative ones count from the last."""
    mesh = _MESH.get()
    if mesh is None or not axes:
        return x
    spec: list[object] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    for axis in axes:
        spec[axis] = None
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
