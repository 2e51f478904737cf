"""Entries of a program that take a whole apart into stacked pieces, and put pieces together.

Pieces are over some axes of a mesh. Stacked, they have a leading axis with one place for each
device along these axes, laid out over them. What the other axes do is left to XLA's partitioner: a
batch that they split stays split, and no device gathers it.

>>> mesh = jax.make_mesh((2, 4), ("dp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
>>> recipe = cut_recipe(mesh, ("tp",), P("dp", "tp"))
>>> cut = jax.jit(lambda x: recipe.run([x], [], None)[0])
>>> jax.eval_shape(cut, jax.ShapeDtypeStruct((6, 8), "float32")).shape
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
"""Mesh axes along which pieces are parts of one, each with how: `sum`, `avg`, `min`, `max` or
`first` (one device's piece for all). Along the others that split nothing, pieces are equal."""


def spec_along(spec: P, axes: Sequence[str]) -> P:
    """What a spec says of some axes of the mesh.

    Args:
        spec: of a whole.
        axes: the names.

    >>> spec_along(P(("dp", "tp"), None, "dp"), ("tp",))
    P('tp', None, None)
    """
    entries = [tuple(name for name in axis_names(entry) if name in axes) for entry in spec]
    return P(*(entry or None for entry in entries))


def cut_shape(
    shape: Sequence[int], mesh: jax.sharding.Mesh, axes: Sequence[str], spec: P
) -> tuple[int, ...]:
    """The shape of the stacked pieces of a whole; extents may be symbols of torch.

    Args:
        shape: of the whole, which the mesh axes divide.
        mesh: the devices.
        axes: those that the pieces are over.
        spec: how the whole is cut.

    >>> mesh = jax.make_mesh((2, 4), ("dp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
    >>> cut_shape((6, 8), mesh, ("tp",), P("dp", "tp"))
    (4, 6, 2)
    >>> joined_shape((4, 6, 2), mesh, ("tp",), P("dp", "tp"))
    (6, 8)
    """
    counts = block_counts(len(shape), mesh, axes, spec)
    pieces = (size // count for size, count in zip(shape, counts, strict=True))
    return (devices_along(mesh, axes), *pieces)


def joined_shape(
    shape: Sequence[int], mesh: jax.sharding.Mesh, axes: Sequence[str], spec: P
) -> tuple[int, ...]:
    """The shape of the whole of stacked pieces; extents may be symbols of torch.

    Args:
        shape: of the stacked pieces.
        mesh: the devices.
        axes: those that the pieces are over.
        spec: how they lie in the whole.
    """
    counts = block_counts(len(shape) - 1, mesh, axes, spec)
    return tuple(size * count for size, count in zip(shape[1:], counts, strict=True))


def restacked_shape(
    shape: Sequence[int], mesh: jax.sharding.Mesh, axes: Sequence[str]
) -> tuple[int, ...]:
    """The shape of stacked pieces that become as many as there are devices along other axes.

    Args:
        shape: of the stacked pieces.
        mesh: the devices.
        axes: those that they are over then.
    """
    return (devices_along(mesh, axes), *shape[1:])


def block_counts(
    ndim: int, mesh: jax.sharding.Mesh, axes: Sequence[str], spec: P
) -> tuple[int, ...]:
    """Into how many pieces each axis of a whole is cut, along some axes of the mesh.

    Args:
        ndim: rank of the whole.
        mesh: the devices.
        axes: the names.
        spec: how the whole is cut.
    """
    entries = [*spec_along(spec, axes), *[None] * (ndim - len(spec))]
    return tuple(devices_along(mesh, axis_names(entry)) for entry in entries)


def devices_along(mesh: jax.sharding.Mesh, axes: Sequence[str]) -> int:
    """How many devices there are along some axes of a mesh.

    Args:
        mesh: the devices.
        axes: the names.
    """
    return math.prod(mesh.shape[name] for name in axes)


def mapped(
    local: Callable[[jax.Array], jax.Array],
    mesh: jax.sharding.Mesh,
    axes: Axes,
    before: P,
    after: P,
) -> Callable[[jax.Array], jax.Array]:
    """A function of one device's piece, for all devices along some axes of a mesh.

    Args:
        local: the function.
        mesh: the devices.
        axes: the names; the other axes are the partitioner's.
        before: how the argument is cut along these axes.
        after: likewise the result.
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
def cut_recipe(
    mesh: jax.sharding.Mesh, axes: Axes, spec: P, first: Axes = (), parts: int = 1
) -> Recipe:
    """From a whole to stacked pieces.

    Args:
        mesh: the devices.
        axes: those that the pieces are over.
        spec: how the whole is cut.
        first: axes along which the devices after the first get zeros.
        parts: what every piece is divided by.
    """

    def local(piece: jax.Array) -> jax.Array:
        if first:
            piece = jax.numpy.where(_is_first(first), piece, jax.numpy.zeros_like(piece))
        return (piece if parts == 1 else piece / parts)[None]

    return _recipe("to_local", mapped(local, mesh, axes, spec_along(spec, axes), P(axes)))


@cached(1024)
def join_recipe(mesh: jax.sharding.Mesh, axes: Axes, spec: P, how: Reductions) -> Recipe:
    """From stacked pieces to a whole.

    Args:
        mesh: the devices.
        axes: those that the pieces are over.
        spec: how they lie in the whole.
        how: see `Reductions`.
    """

    def local(stacked: jax.Array) -> jax.Array:
        return _reduced(stacked[0], mesh, axes, how)

    return _recipe("from_local", mapped(local, mesh, axes, P(axes), spec_along(spec, axes)))


@cached(1024)
def widen_recipe(mesh: jax.sharding.Mesh, axes: Axes, wide: Axes) -> Recipe:
    """From pieces over some axes to pieces over more: copies along the new ones.

    Args:
        mesh: the devices.
        axes: those that the pieces are over.
        wide: those that they are to be over; among them `axes`.
    """
    return _recipe("to_local", mapped(lambda stacked: stacked, mesh, wide, P(axes), P(wide)))


@cached(1024)
def narrow_recipe(mesh: jax.sharding.Mesh, axes: Axes, wide: Axes, how: Reductions) -> Recipe:
    """From pieces over some axes to pieces over fewer.

    Args:
        mesh: the devices.
        axes: those that the pieces are to be over.
        wide: those that they are over; among them `axes`.
        how: how those along the others become one, see `Reductions`.
    """

    def local(stacked: jax.Array) -> jax.Array:
        return _reduced(stacked, mesh, wide, how)

    return _recipe("from_local", mapped(local, mesh, wide, P(wide), P(axes)))


def _recipe(name: str, run: Callable[[jax.Array], jax.Array]) -> Recipe:
    return Recipe(name, lambda arrays, _scalars, _key: [run(arrays[0])], 1)


def summable(piece: jax.Array, mesh: jax.sharding.Mesh, axes: Sequence[str]) -> jax.Array:
    """A piece in the dtype in which it is summed over devices.

    XLA's compiler for CPUs ends the process at a sum of 16-bit numbers along some axes of a mesh,
    where others are the partitioner's (jaxlib 0.10.2). It takes such sums in 32 bits, so they are.

    Args:
        piece: one device's.
        mesh: the devices.
        axes: those that the pieces are over.
    """
    dtype = piece.dtype
    is_on_cpu = mesh.devices.flat[0].platform == "cpu"
    is_narrow = is_on_cpu and {*axes} != {*mesh.axis_names} and dtype.itemsize < 4
    if dtype.kind == "b" or (is_narrow and jax.numpy.issubdtype(dtype, jax.numpy.integer)):
        return piece.astype("int32")
    return piece.astype("float32") if is_narrow else piece


def _reduced(piece: jax.Array, mesh: jax.sharding.Mesh, over: Axes, how: Reductions) -> jax.Array:
    for kind, reduce in _REDUCE.items():
        if axes := tuple(axis for axis, asked in how if asked == kind):
            piece = reduce(summable(piece, mesh, over), axes).astype(piece.dtype)
    return piece


def _is_first(axes: Axes) -> jax.Array:
    """On a device: whether it is the first along some axes."""
    return functools.reduce(lambda a, b: a & b, [jax.lax.axis_index(axis) == 0 for axis in axes])


def _first(piece: jax.Array, axes: Axes) -> jax.Array:
    """The piece of the first device along some axes, on all of them."""
    return jax.lax.psum(jax.numpy.where(_is_first(axes), piece, jax.numpy.zeros_like(piece)), axes)


_REDUCE: dict[str, Callable[[Any, Axes], Any]] = {
    "first": _first,
    "sum": jax.lax.psum,
    "avg": jax.lax.pmean,
    "min": jax.lax.pmin,
    "max": jax.lax.pmax,
}
