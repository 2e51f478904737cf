"""Axes that XLA's partitioner must find whole.

Some operations cannot be split along some of their axes. A Fourier transform whose axis is split
into pieces of unequal size ends the process. A running sum takes what the neighbours send for a
running minimum of the same array, and the zeros that were put before the first piece. A lowering
asks for the axes that it needs whole; the others stay as they are.

>>> x = jax.numpy.ones((2, 3))
>>> whole(x, [1]) is x                           # no mesh, nothing to do
True
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from isoshard.core.blocks.interpreting import recording
from isoshard.core.layout.axis_types import dividing
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.lifting.in_blocks import in_blocks

from .program_partition import partition


def on_a_mesh() -> bool:
    """Whether the program being compiled is split over several devices."""
    mesh = partition().mesh
    return recording() or (mesh is not None and mesh.size > 1)


def whole(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The array with `axes` on every device as a whole; negative ones count from the last."""
    mesh = partition().mesh
    if mesh is None or not axes:
        return x
    spec: list[object] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    for axis in axes:
        spec[axis] = None
    return constrained(x, NamedSharding(mesh, PartitionSpec(*spec)))


def diagonal(x: jax.Array, offset: int, axis1: int, axis2: int) -> jax.Array:
    """`jnp.diagonal` of two whole axes.

    XLA's partitioner takes wrong elements of an axis that is split, where the diagonal is laid out
    over more mesh axes than `x` (jax 0.10.2).
    """
    return jax.numpy.diagonal(whole(x, [axis1, axis2]), offset, axis1, axis2)


def named(x: jax.Array) -> jax.Array:
    """The array as one that XLA's partitioner does not take for what it was made of.

    Says nothing of its layout; nothing of it is left in the compiled program. It has to stand
    before what is cut from it: what comes after the cut is laid out anew as the cut is.
    """
    mesh = partition().mesh
    if mesh is None or mesh.size == 1:
        return x
    free = [PartitionSpec.UNCONSTRAINED] * x.ndim
    return constrained(x, NamedSharding(mesh, PartitionSpec(*free)))


def constrained(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The array so laid out, but for axes in blocks of unequal sizes: these are not XLA's to split.

    Args:
        x: traced.
        sharding: what is asked for; one entry per axis.
    """

    def even_axes(u: Any) -> Any:
        entries = zip(sharding.spec, u.sizes, strict=True)
        free = [e if sizes is None else PartitionSpec.UNCONSTRAINED for e, sizes in entries]
        there = NamedSharding(sharding.mesh, PartitionSpec(*free))
        array = jax.lax.with_sharding_constraint(u.array, dividing(there, u.array.shape))
        return UnevenArray(array, u.shape, u.sizes, u.layout)

    even = dividing(sharding, x.shape)
    whole_array = functools.partial(jax.lax.with_sharding_constraint, shardings=even)
    return in_blocks(whole_array, even_axes)(x)
