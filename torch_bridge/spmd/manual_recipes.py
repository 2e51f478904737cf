"""Entries of a program that split a global tensor into stacked shards, and join shards.

Shards are over some axes of a mesh. Stacked, they have a leading axis with one index for each
device along these axes, and it is sharded over them. The other axes are left to XLA's partitioner:
a batch that they split remains split, and no device gathers it.

>>> mesh = jax.make_mesh((2, 4), ("dp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
>>> recipe = split_recipe(mesh, ("tp",), P("dp", "tp"))
>>> split = jax.jit(lambda x: recipe.run([x], [], None)[0])
>>> jax.eval_shape(split, jax.ShapeDtypeStruct((6, 8), "float32")).shape
(4, 6, 2)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.spec import axis_names
from isoshard.core.runtime.caches import cached
from isoshard.torch_bridge.engine.recording.tape import Recipe

Axes = tuple[str, ...]

Reductions = tuple[tuple[str, str], ...]
"""Mesh axes along which shards are to be reduced, each with how: `sum`, `avg`, `min`, `max` or
`first` (the first device's shard for all). Along other axes that split nothing they are equal."""


def spec_along(spec: P, axes: Sequence[str]) -> P:
    """A spec restricted to some axes of the mesh.

    Args:
        spec: of a global tensor.
        axes: the names.

    >>> spec_along(P(("dp", "tp"), None, "dp"), ("tp",))
    P('tp', None, None)
    """
    entries = [tuple(name for name in axis_names(entry) if name in axes) for entry in spec]
    return P(*(entry or None for entry in entries))


def stacked_shape(
    shape: Sequence[int], mesh: jax.sharding.Mesh, axes: Sequence[str], spec: P
) -> tuple[int, ...]:
    """The shape of the stacked shards of a tensor; extents may be symbols of torch.

    Args:
        shape: of the global tensor, which the mesh axes divide.
        mesh: the devices.
        axes: those that the shards are over.
        spec: how the global tensor is split.

    >>> mesh = jax.make_mesh((2, 4), ("dp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
    >>> stacked_shape((6, 8), mesh, ("tp",), P("dp", "tp"))
    (4, 6, 2)
    >>> joined_shape((4, 6, 2), mesh, ("tp",), P("dp", "tp"))
    (6, 8)
    """
    counts = block_counts(len(shape), mesh, axes, spec)
    shape_of_shard = (size // count for size, count in zip(shape, counts, strict=True))
    return (devices_along(mesh, axes), *shape_of_shard)


def joined_shape(
    shape: Sequence[int], mesh: jax.sharding.Mesh, axes: Sequence[str], spec: P
) -> tuple[int, ...]:
    """The global shape of stacked shards; extents may be symbols of torch.

    Args:
        shape: of the stacked shards.
        mesh: the devices.
        axes: those that the shards are over.
        spec: how the global tensor is split.
    """
    counts = block_counts(len(shape) - 1, mesh, axes, spec)
    return tuple(size * count for size, count in zip(shape[1:], counts, strict=True))


def restacked_shape(
    shape: Sequence[int], mesh: jax.sharding.Mesh, axes: Sequence[str]
) -> tuple[int, ...]:
    """The shape of stacked shards once they are over other axes."""
    return (devices_along(mesh, axes), *shape[1:])


def block_counts(
    ndim: int, mesh: jax.sharding.Mesh, axes: Sequence[str], spec: P
) -> tuple[int, ...]:
    """Into how many shards some axes of a mesh split each axis of a tensor.

    Args:
        ndim: rank of the tensor.
        mesh: the devices.
        axes: the names.
        spec: how the tensor is split.
    """
    entries = [*spec_along(spec, axes), *[None] * (ndim - len(spec))]
    return tuple(devices_along(mesh, axis_names(entry)) for entry in entries)


def devices_along(mesh: jax.sharding.Mesh, axes: Sequence[str]) -> int:
    """The number of devices along some axes of a mesh."""
    return math.prod(mesh.shape[name] for name in axes)


def mapped(
    local: Callable[[jax.Array], jax.Array],
    mesh: jax.sharding.Mesh,
    axes: Axes,
    before: P,
    after: P,
) -> Callable[[jax.Array], jax.Array]:
    """A function of one device's shard, for all devices along some axes of a mesh.

    Args:
        local: the function.
        mesh: the devices.
        axes: the names; the other axes are the partitioner's.
        before: how the argument is split along these axes.
        after: how the result is.
    """
    return jax.shard_map(
        local,
        mesh=auto(mesh),
        in_specs=before,
        out_specs=after,
        axis_names=set(axes),
        check_vma=False,
    )


@cached(1024)
def split_recipe(
    mesh: jax.sharding.Mesh, axes: Axes, spec: P, first: Axes = (), divisor: int = 1
) -> Recipe:
    """From a global tensor to stacked shards.

    Args:
        mesh: the devices.
        axes: those that the shards are over.
        spec: how the global tensor is split.
        first: axes along which the devices after the first get zeros.
        divisor: what every shard is divided by.
    """

    def local(shard: jax.Array) -> jax.Array:
        if first:
            shard = jax.numpy.where(_is_first(first), shard, jax.numpy.zeros_like(shard))
        return (shard if divisor == 1 else shard / divisor)[None]

    return _recipe("to_local", mapped(local, mesh, axes, spec_along(spec, axes), P(axes)))


@cached(1024)
def join_recipe(mesh: jax.sharding.Mesh, axes: Axes, spec: P, how: Reductions) -> Recipe:
    """From stacked shards to a global tensor.

    Args:
        mesh: the devices.
        axes: those that the shards are over.
        spec: how the global tensor is split.
        how: see `Reductions`.
    """

    def local(stacked: jax.Array) -> jax.Array:
        return _reduced(stacked[0], mesh, axes, how)

    return _recipe("from_local", mapped(local, mesh, axes, P(axes), spec_along(spec, axes)))


@cached(1024)
def widen_recipe(mesh: jax.sharding.Mesh, axes: Axes, wide: Axes) -> Recipe:
    """From shards over some axes to shards over more: copies along the new ones.

    Args:
        mesh: the devices.
        axes: those that the shards are over.
        wide: those that the result is over; among them `axes`.
    """
    return _recipe("to_local", mapped(lambda stacked: stacked, mesh, wide, P(axes), P(wide)))


@cached(1024)
def narrow_recipe(mesh: jax.sharding.Mesh, axes: Axes, wide: Axes, how: Reductions) -> Recipe:
    """From shards over some axes to shards over fewer.

    Args:
        mesh: the devices.
        axes: those that the result is over.
        wide: those that the shards are over; among them `axes`.
        how: the reductions along the others, see `Reductions`.
    """

    def local(stacked: jax.Array) -> jax.Array:
        return _reduced(stacked, mesh, wide, how)

    return _recipe("from_local", mapped(local, mesh, wide, P(wide), P(axes)))


def _recipe(name: str, run: Callable[[jax.Array], jax.Array]) -> Recipe:
    return Recipe(name, lambda arrays, _scalars, _key: [run(arrays[0])], 1)


def summable(shard: jax.Array, mesh: jax.sharding.Mesh, axes: Sequence[str]) -> jax.Array:
    """A shard in the dtype in which it is summed over devices.

    XLA's compiler for CPUs ends the process at a sum of 16-bit numbers along some axes of a mesh,
    where others are the partitioner's (jaxlib 0.10.2); so such sums are taken in 32 bits.
    """
    dtype = shard.dtype
    is_on_cpu = mesh.devices.flat[0].platform == "cpu"
    is_narrow = is_on_cpu and {*axes} != {*mesh.axis_names} and dtype.itemsize < 4
    if dtype.kind == "b" or (is_narrow and jax.numpy.issubdtype(dtype, jax.numpy.integer)):
        return shard.astype("int32")
    return shard.astype("float32") if is_narrow else shard


def _reduced(shard: jax.Array, mesh: jax.sharding.Mesh, over: Axes, how: Reductions) -> jax.Array:
    for kind, reduce in _REDUCE.items():
        if axes := tuple(axis for axis, reduction in how if reduction == kind):
            shard = reduce(summable(shard, mesh, over), axes).astype(shard.dtype)
    return shard


def _is_first(axes: Axes) -> jax.Array:
    """Whether the device that runs this is the first along some axes."""
    return functools.reduce(lambda a, b: a & b, [jax.lax.axis_index(axis) == 0 for axis in axes])


def _first(shard: jax.Array, axes: Axes) -> jax.Array:
    """The shard of the first device along some axes, on all of them."""
    return jax.lax.psum(jax.numpy.where(_is_first(axes), shard, jax.numpy.zeros_like(shard)), axes)


_REDUCE: dict[str, Callable[[Any, Axes], Any]] = {
    "first": _first,
    "sum": jax.lax.psum,
    "avg": jax.lax.pmean,
    "min": jax.lax.pmin,
    "max": jax.lax.pmax,
}
