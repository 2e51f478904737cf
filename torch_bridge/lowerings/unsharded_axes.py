"""Axes that must be unsharded for XLA's partitioner.

Some operations cannot be split along some of their axes. A Fourier transform whose axis is split
into shards of unequal size ends the process. A running sum takes what the neighbours send for a
running minimum of the same array, and the zeros that were put before the first shard. A lowering
unshards the axes that it requires; the others are unchanged.

>>> x = jax.numpy.ones((2, 3))
>>> unsharded(x, [1]) is x                           # no mesh, nothing to do
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


def unsharded(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The array with `axes` replicated; negative axes count from the last."""
    mesh = partition().mesh
    if mesh is None or not axes:
        return x
    spec: list[object] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    for axis in axes:
        spec[axis] = None
    return constrained(x, NamedSharding(mesh, PartitionSpec(*spec)))


def diagonal(x: jax.Array, offset: int, axis1: int, axis2: int) -> jax.Array:
    """`jnp.diagonal` of two unsharded axes.

    XLA's partitioner takes wrong elements of an axis that is split, where the diagonal is laid out
    over more mesh axes than `x` (jax 0.10.2).
    """
    return jax.numpy.diagonal(unsharded(x, [axis1, axis2]), offset, axis1, axis2)


def named(x: jax.Array) -> jax.Array:
    """The array as a new value, which XLA's partitioner does not trace to its operands.

    Does not constrain its sharding, and leaves nothing in the compiled program. It has to be
    before a slice of it: what follows the slice is resharded as the slice is.
    """
    mesh = partition().mesh
    if mesh is None or mesh.size == 1:
        return x
    free = [PartitionSpec.UNCONSTRAINED] * x.ndim
    return constrained(x, NamedSharding(mesh, PartitionSpec(*free)))


def constrained(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The array constrained to a sharding, but for axes in uneven blocks."""

    def even_axes(u: Any) -> Any:
        entries = zip(sharding.spec, u.sizes, strict=True)
        free = [e if sizes is None else PartitionSpec.UNCONSTRAINED for e, sizes in entries]
        there = NamedSharding(sharding.mesh, PartitionSpec(*free))
        array = jax.lax.with_sharding_constraint(u.array, dividing(there, u.array.shape))
        return UnevenArray(array, u.shape, u.sizes, u.layout)

    even = dividing(sharding, x.shape)
    constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=even)
    return in_blocks(constrain, even_axes)(x)
