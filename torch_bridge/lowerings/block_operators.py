"""Operators over space on images in blocks of unequal sizes: by halos, as `iso.domain` does them.

A lowering hands over what it computes at the true shape; where the program is interpreted on blocks
the operator of `iso.domain` is computed instead, and its gradient is that operator's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from isoshard.core.blocks.interpreting import recording
from isoshard.core.blocks.packing import repack
from isoshard.core.layout import custom_partitioning
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.lifting.in_blocks import in_blocks

from .program_partition import partition

Function = Callable[..., Any]


def by_rows(x: jax.Array, rank: int) -> bool:
    """Whether devices send each other the rows that are read, in a program of split images.

    Args:
        x: (batch, channels, *space); where it is split is known when the program is compiled.
        rank: the axes of space.
    """
    return x.ndim == rank + 2 and partition().images and by_shards(x)


def by_shards(x: jax.Array) -> bool:
    """Whether an operator may define its per-device program, in a program of split arrays.

    Not of 64 bits: JAX (0.10.2) lowers what such an operator does in a thread where it makes
    constants of 32.
    """
    return x.dtype.itemsize <= 4 and partition().mesh is not None and _may_apply(x)


def by_groups(x: jax.Array) -> bool:
    """Whether that is so of a convolution in groups, also of 64 bits and in a function of JAX's.

    Outside the engine, the mesh is JAX's current one, as of the arguments of
    `jax.jit`.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact) or not _may_apply(x):
        return False
    return partition().mesh is not None or jax.typeof(x).sharding.mesh.size > 1


def _may_apply(x: jax.Array) -> bool:
    return 0 not in x.shape and not recording() and custom_partitioning.possible()


def over_space(
    function: Function, operator: Function, rank: int, *, channels_last: bool = False
) -> Function:
    """A function of images that is another on images in blocks.

    Args:
        function: of (batch, channels, *space), on unsharded arrays.
        operator: the same in `iso.domain`.
        rank: the axes of space.
        channels_last: whether the function, and not the operator, has the channels at the end.

    Returns:
        A function of the same arguments. Without a batch, with channels in blocks, or with no axis
        of space in blocks, it is `function` primitive by primitive.
    """

    def rule(u: Any, *operands: Any) -> Any:
        if not isinstance(u, UnevenArray) or u.ndim != rank + 2:
            return NotImplemented
        if any(isinstance(operand, UnevenArray) for operand in operands):
            return NotImplemented
        space = range(1, rank + 1)
        u = _reordered(u, (0, rank + 1, *space)) if channels_last else u
        if u.sizes[1] is not None or not any(u.sizes[2:]):
            return NotImplemented
        out = operator(u, *operands)
        return _reordered(out, (0, *range(2, rank + 2), 1)) if channels_last else out

    return in_blocks(function, rule)


def pulled_over_space(
    function: Function, operator: Function, rank: int, shape: Sequence[int]
) -> Function:
    """The gradient of a linear operator of images, as a function of that of its result alone.

    Args:
        function: the gradient of the images at the true shape.
        operator: in `iso.domain`, of the images.
        rank: the axes of space.
        shape: of the images.

    Returns:
        A function of the gradient. The images' rows are assumed to be sharded with the results at
        the same position, as `iso.domain.interpolate` shards results.
    """

    def pulled(u: Any) -> Any:
        sizes = list(u.sizes)
        for axis in range(2, rank + 2):
            if sizes[axis] is not None:
                sizes[axis] = _below(sizes[axis], shape[axis])
        padded = [
            size if own is None else max(own) * len(own)
            for size, own in zip(shape, sizes, strict=True)
        ]
        image = UnevenArray(jnp.zeros(padded, u.dtype), shape, sizes, u.layout)
        there, pull = jax.vjp(operator, image)
        residual = repack(u, there.sizes) if there.sizes != u.sizes else u
        return pull(UnevenArray(residual.array, there.shape, there.sizes, there.layout))[0]

    return over_space(function, pulled, rank)


def _reordered(u: UnevenArray, order: tuple[int, ...]) -> UnevenArray:
    """The axes in another order."""
    assert u.layout is not None  # arrays in blocks have a layout
    entries = (*u.layout.spec, *(None,) * (u.ndim - len(u.layout.spec)))
    spec = PartitionSpec(*(entries[axis] for axis in order))
    shape = [u.shape[axis] for axis in order]
    sizes = [u.sizes[axis] for axis in order]
    layout = NamedSharding(u.layout.mesh, spec)
    return UnevenArray(jnp.transpose(u.array, order), shape, sizes, layout)


def _below(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The blocks of `count` rows, each with the result in its middle."""
    results = sum(sizes)
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    sizes_below = [0] * len(sizes)
    for row in range(count):
        at = (2 * row + 1) * results // (2 * count)
        sizes_below[next(d for d in range(len(sizes)) if ends[d] <= at < ends[d + 1])] += 1
    return tuple(sizes_below)
