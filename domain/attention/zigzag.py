"""Zigzag order: under a causal mask, every device has the same work.

In order, the last device's queries see all keys and the first's only their own. So the sequence is
divided into 2n slices, and device `i` of n has the slices `i` and `2n - 1 - i`: an early and a late
one. Every step of the ring is then half a block of work for everyone.

>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((4,), ("x",))
>>> x = jnp.arange(8.0).reshape(1, 8)
>>> zigzag(x, mesh=mesh, axis="x")
Array([[0., 7., 1., 6., 2., 5., 3., 4.]], dtype=float32)
>>> unzigzag(zigzag(x, mesh=mesh, axis="x"), mesh=mesh, axis="x")
Array([[0., 1., 2., 3., 4., 5., 6., 7.]], dtype=float32)

A model whose layers work token by token can take its input in this order once, and leave it so:
`ring_attention(.., order="zigzag")` then moves nothing but keys and values.

Source: the variant of ring attention in https://github.com/zhuzilin/ring-flash-attention; Striped
Attention (https://arxiv.org/abs/2311.09431) interleaves single tokens instead.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import (
    SpecError,
    UnevenError,
    any_framework,
    as_mesh,
    entries_of,
    permute_blocks,
    record_sharding,
    sharding_of,
)
from isoshard.core.kit import spec_entries_axis_names as axis_names

from .attention_arguments import axes_of
from .setup import count


@any_framework
def zigzag(x: jax.Array, *, mesh: Mesh, axis: str | tuple[str, ...], dim: int = 1) -> jax.Array:
    """Bring a sequence from its order into zigzag order.

    Two collective-permutes of half a shard each, forward, and two in the gradient.

    Args:
        x: any shape and dtype, split along `dim` over `axis`, or replicated.
        mesh: the devices.
        axis: the mesh axes that split the sequence.
        dim: the axis of `x` that is the sequence.

    Returns:
        The same elements, split over `axis`; device `i` of n has slices `i` and `2n - 1 - i` of
        2n. How other mesh axes split `x` does not change.

    Raises:
        SpecError: the mesh has no such axis.
        UnevenError: twice the number of shards does not divide the sequence.
        ValueError: `x` has no axis `dim`.

    Example:
        >>> mesh = jax.make_mesh((2,), ("x",))
        >>> zigzag(jnp.arange(8), mesh=mesh, axis="x", dim=0).tolist()     # slices 0, 3 and 1, 2
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return _moved(x, _checked(x, mesh, axis, dim), dim, False)


@any_framework
def unzigzag(x: jax.Array, *, mesh: Mesh, axis: str | tuple[str, ...], dim: int = 1) -> jax.Array:
    """Bring a sequence from zigzag order into its order; what `zigzag` does, undone.

    Args:
        x: any shape and dtype, in zigzag order along `dim`.
        mesh: the devices.
        axis: the mesh axes that split the sequence.
        dim: the axis of `x` that is the sequence.

    Returns:
        The same elements in order, split over `axis`.

    Raises:
        SpecError: the mesh has no such axis.
        UnevenError: twice the number of shards does not divide the sequence.
        ValueError: `x` has no axis `dim`.

    Example:
        >>> mesh = jax.make_mesh((2,), ("x",))
        >>> x = jnp.array([0, 1, 6, 7, 2, 3, 4, 5])
        >>> unzigzag(x, mesh=mesh, axis="x", dim=0).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return _moved(x, _checked(x, mesh, axis, dim), dim, True)


def _checked(x, mesh, axis, dim: int) -> tuple[Mesh, tuple[str, ...]]:
    mesh = as_mesh(mesh, abstract=True)
    ring = axes_of(axis, mesh, "axis")
    if not ring:
        raise SpecError(f"axis names the mesh axes that split the sequence, not {axis}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"there is no axis {dim} in an array of shape {tuple(x.shape)}")
    slices = 2 * count(mesh, ring)
    if x.shape[dim] % slices:
        raise UnevenError(
            f"zigzag order divides the sequence in {slices} equal slices, two per device, and axis "
            f"{dim} of an array of shape {tuple(x.shape)} is no multiple of that. Pad it to "
            f"{-(-x.shape[dim] // slices) * slices}, or keep the sequence in order."
        )
    return mesh, ring


def _moved(x, where: tuple[Mesh, tuple[str, ...]], dim: int, back: bool) -> jax.Array:
    mesh, ring = where
    moved = _move(x, where, dim, back)
    sharding = sharding_of(x)
    spec_entries = (
        entries_of(sharding.spec)
        if isinstance(sharding, NamedSharding)
        else [P.UNCONSTRAINED] * x.ndim
    )
    entries = [*spec_entries, *[None] * x.ndim][: x.ndim]
    result_entries: list[Any] = [
        entry
        if entry is P.UNCONSTRAINED
        else tuple(name for name in axis_names(entry) if name not in ring) or None
        for entry in entries
    ]
    result_entries[dim] = ring
    return record_sharding(moved, NamedSharding(mesh, P(*result_entries)))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _move(x, where: tuple[Mesh, tuple[str, ...]], dim: int, back: bool) -> jax.Array:
    mesh, ring = where
    devices = count(mesh, ring)
    if devices == 1:
        return x
    dim %= x.ndim
    spec = P(*[None] * dim, ring)
    local = functools.partial(ordered if back else zigzagged, mesh, ring, dim)
    return jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(ring), check_vma=False
    )(x)


def zigzagged(mesh: Mesh, ring: tuple[str, ...], dim: int, x: jax.Array) -> jax.Array:
    """`zigzag` of one device's shard, inside `jax.shard_map`."""
    even, odd = _routes(count(mesh, ring))
    first, second = jnp.split(x, 2, dim)
    first = permute_blocks(first, mesh, ring, even)
    second = permute_blocks(second, mesh, ring, odd)
    straight = jax.lax.axis_index(ring) % 2 == 0
    return jnp.concatenate(_swap(straight, first, second), dim)


def ordered(mesh: Mesh, ring: tuple[str, ...], dim: int, x: jax.Array) -> jax.Array:
    """`unzigzag` of one device's shard; what `zigzagged` does, undone."""
    even, odd = ([(to, at) for at, to in route] for route in _routes(count(mesh, ring)))
    straight = jax.lax.axis_index(ring) % 2 == 0
    first, second = _swap(straight, *jnp.split(x, 2, dim))
    first = permute_blocks(first, mesh, ring, even)
    second = permute_blocks(second, mesh, ring, odd)
    return jnp.concatenate([first, second], dim)


def _routes(devices: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Where the even and the odd slices go: each is a permutation of the devices."""
    home = [min(index, 2 * devices - 1 - index) for index in range(2 * devices)]
    return [(i, home[2 * i]) for i in range(devices)], [
        (i, home[2 * i + 1]) for i in range(devices)
    ]


def _swap(straight, first, second):
    """An odd device's early slice is an odd one, so it comes with the second message."""
    return jnp.where(straight, first, second), jnp.where(straight, second, first)
