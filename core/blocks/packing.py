"""Packing an array into blocks of any sizes over a mesh, unpacking and repacking it.

>>> import numpy as np
>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((4,), ("x",))
>>> rows = np.arange(5, dtype=np.float32)
>>> pack(rows, mesh, ("x",))                             # sizes as torch.chunk gives them
UnevenArray(float32[5] in float32[8], axis 0 in blocks of 2: 2, 2, 1, 0 valid; P('x',))
>>> u = pack(rows, mesh, ("x",), (0, 3, 1, 1))
>>> u.array.tolist()
[0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 4.0, 0.0, 0.0]
>>> unpack(u).tolist()
[0.0, 1.0, 2.0, 3.0, 4.0]
>>> repack(u, (2, 1, 1, 1)).array.tolist()
[0.0, 1.0, 2.0, 0.0, 3.0, 0.0, 4.0, 0.0]

An array in equal blocks is a plain `jax.Array`: it needs no padding.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError, no_sharing
from isoshard.core.frameworks import check_no_tensor
from isoshard.core.layout.mesh import as_mesh, mesh_of
from isoshard.core.layout.spec import axis_names, named_sharding, same_layout
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.layout.uneven import Sizes, UnevenArray
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.caches import cached
from isoshard.core.transfer.host_memory import host_to_jax
from isoshard.core.transfer.reshard import reshard_array

from .any_mesh import any_mesh
from .axis_moves import movable, move_axis
from .block_values import Splits
from .chunk_sizes import SizesLike, plan_splits
from .splits import pack_axis, unpack_axis
from .traced_shardings import record_sharding
from .uneven_values import splits_of


@any_mesh
def pack(
    x: Any,
    mesh: Mesh,
    spec: Any,
    sizes: SizesLike = None,
    *,
    copy: bool | None = None,
    name: str | None = None,
) -> Any:
    """Shard a global array in blocks of given sizes.

    Args:
        x: a NumPy or JAX array of the true shape; also traced.
        mesh: the mesh, or what `as_mesh` takes.
        spec: any spelling of a spec; axes need not divide.
        sizes: how many elements each block has, where only one axis is split; or per axis of `x`
            None or that; or a mapping from axes. By default as `torch.chunk`, where an axis does
            not divide.
        copy: as for `iso.shard`; padding needs a copy, so False raises unless nothing is padded.
        name: of `x`, for messages.

    Returns:
        An UnevenArray; a jax.Array if no axis needs padding.

    Raises:
        UnevenError: sizes do not sum to an axis, are not one per block, or are of an axis that is
            not split; all errors in one message.
        SpecError: the spec does not fit.
        CopyError: padding needs a copy and copy is False.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> pack(np.ones(5), make_mesh((4,), ("x",)), ("x",), (2, 2, 2), name="rows")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.UnevenError: rows: sizes do not fit shape (5,) by P('x',): axis 0 is given 3 sizes for its 4 blocks; axis 0 is given 6 elements, and has 5. Give one size per block, which together make the axis, as torch.chunk: (2, 2, 1, 0).
    """  # noqa: E501
    check_no_tensor(x, "pack")
    mesh, name = as_mesh(mesh, abstract=True), name or "array"
    shape = tuple(x.shape)
    sharding = named_sharding(spec, mesh, len(shape), name=name)
    splits = plan_splits(shape, sharding, sizes, name=name)
    if not any(splits):
        move: Any = host_to_jax if isinstance(x, np.ndarray) else reshard_array
        return move(x, sharding, copy=copy, name=name)
    if copy is False:
        raise no_sharing(name, "blocks of other sizes are padded, which takes new memory")
    return UnevenArray(packed(x, splits, sharding, name), shape, _sizes(splits), sharding)


@any_mesh
def unpack(u: UnevenArray) -> jax.Array:
    """Unpack an array to its true shape.

    Args:
        u: the array; also traced.

    Returns:
        The global array. Axes that were in blocks are replicated, also inside `jax.jit`;
        other axes keep their sharding.

    Example:
        >>> unpack(UnevenArray(jax.numpy.arange(4), (3,), ((1, 2),))).tolist()
        [0, 2, 3]
    """
    check_no_tensor(u, "unpack")
    splits = splits_of(u)
    if not isinstance(u.array, Tracer):
        return _unpack(u.array, splits)
    return record_sharding(_unpacked(u.array, splits), _unpacked_sharding(u.layout, splits))


@any_mesh
def repack(u: UnevenArray, sizes: SizesLike = None) -> Any:
    """Move elements between blocks so that these have other sizes, on the same devices.

    Each device receives its new rows; none gathers the axis.

    Args:
        u: the array, sharded over a mesh; also traced.
        sizes: as for `pack`.

    Returns:
        An UnevenArray; a jax.Array if no axis needs padding.

    Raises:
        UnevenError: as `pack`.
        ShardingError: the array is on no mesh.

    Example:
        >>> u = pack(np.arange(5), jax.make_mesh((4,), ("x",)), ("x",), (0, 3, 1, 1))
        >>> repack(u, (2, 1, 1, 1))
        UnevenArray(int32[5] in int32[8], axis 0 in blocks of 2: 2, 1, 1, 1 valid; P('x',))
    """
    check_no_tensor(u, "repack")
    layout = _layout_of(u)
    return relaid(u, layout, plan_splits(u.shape, layout, sizes))


@any_mesh
def reshard_uneven(u: UnevenArray, spec: Any, mesh: Mesh | None = None) -> Any:
    """Reshard an array; sizes remain where there are as many blocks.

    Raises:
        SpecError: the spec does not fit.
        ShardingError: the array is on no mesh, and none is passed.
    """
    target_mesh: Any = _layout_of(u).mesh if mesh is None else as_mesh(mesh, abstract=True)
    sharding = named_sharding(spec, target_mesh, u.ndim)
    return relaid(u, sharding, plan_splits(u.shape, sharding, kept_sizes(u.sizes, sharding)))


def kept_sizes(sizes: Sizes, sharding: NamedSharding) -> dict[int, tuple[int, ...]]:
    """The sizes of those axes that another sharding splits into as many blocks."""
    shape = sharding.mesh.shape
    counts = [math.prod(shape[axis] for axis in axis_names(entry)) for entry in sharding.spec]
    return {
        axis: size
        for axis, (size, count) in enumerate(zip(sizes, counts, strict=False))
        if size is not None and len(size) == count
    }


@any_mesh
def gather(u: UnevenArray, layout: NamedSharding) -> jax.Array:
    """The global array on every device; counted as "gathers" in `metrics`.

    Returns:
        The array of the true shape, replicated.
    """
    metrics.count("gathers")
    unsplit: Splits = (None,) * u.ndim
    return _converter(splits_of(u), unsplit, NamedSharding(layout.mesh, P()))(u.array)


@any_mesh
def relaid(u: UnevenArray, sharding: NamedSharding, splits: Splits) -> Any:
    """Reshard an array in blocks."""
    before = splits_of(u)
    if isinstance(u.array, Tracer):
        array = jax.lax.with_sharding_constraint(_converted(u.array, before, splits), sharding)
        array = record_sharding(array, sharding)
    elif before == splits and same_layout(u.array.sharding, sharding, u.ndim):
        array = u.array
    elif list(_devices(u.array.sharding)) == list(_devices(sharding)):
        array = _converter(before, splits, sharding)(u.array)
    else:  # over other devices: repacked on its own, replicated, and then moved
        replicated = _layout_of(u)
        replicated = NamedSharding(mesh_of(replicated), P())
        array = _converter(_anywhere(before), _anywhere(splits), replicated)(u.array)
        array = reshard_array(array, sharding)
    if not any(splits):
        return array
    return UnevenArray(array, u.shape, _sizes(splits), sharding)


@any_mesh
def packed(x: Any, splits: Splits, sharding: NamedSharding, name: str) -> Any:
    """The padded array of an unpadded one.

    Returns:
        A jax.Array of the padded shape.
    """
    none: Splits = (None,) * len(splits)
    if isinstance(x, Tracer):
        array = jax.lax.with_sharding_constraint(_converted(x, none, splits), sharding)
        return record_sharding(array, sharding)
    if isinstance(x, np.ndarray):
        for axis, split in enumerate(splits):
            if split is not None:
                shape = (*x.shape[:axis], split.padded, *x.shape[axis + 1 :])
                padded = np.zeros(shape, x.dtype)
                padded[(slice(None),) * axis + (split.positions(),)] = x
                x = padded
        return host_to_jax(x, sharding, name=name)
    if isinstance(x.sharding, NamedSharding) and list(_devices(x.sharding)) == list(
        _devices(sharding)
    ):
        return _converter(none, splits, sharding)(x)
    padded = jax.jit(_converted, static_argnums=(1, 2))(x, none, _anywhere(splits))
    return reshard_array(padded, sharding, name=name)


def _anywhere(splits: Splits) -> Splits:
    """The blocks without the mesh, for a program on other devices."""
    return tuple(None if s is None else dataclasses.replace(s, mesh=None) for s in splits)


def _converted(x: jax.Array, before: Splits, after: Splits) -> jax.Array:
    for axis, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new and old is not None and new is not None and movable(old, new):
            x = move_axis(x, axis, old, new)
        elif old != new:
            x = x if old is None else unpack_axis(x, axis, old)
            x = x if new is None else pack_axis(x, axis, new)
    return x


@cached(256)
def _converter(before: Splits, after: Splits, sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: _converted(x, before, after), out_shardings=sharding)


def _unpacked(x: jax.Array, splits: Splits) -> jax.Array:
    return _converted(x, splits, (None,) * len(splits))


_unpack = jax.jit(_unpacked, static_argnums=1)


def _unpacked_sharding(layout: NamedSharding | None, splits: Splits) -> NamedSharding | None:
    """The sharding of an array in blocks after unpacking."""
    if not isinstance(layout, NamedSharding):
        return None
    entries = [*entries_of(layout.spec), *[None] * len(splits)]
    pairs = zip(entries, splits, strict=False)
    return NamedSharding(layout.mesh, P(*(e if split is None else None for e, split in pairs)))


def _sizes(splits: Splits) -> list[tuple[int, ...] | None]:
    return [None if split is None else split.sizes for split in splits]


def _layout_of(u: UnevenArray) -> NamedSharding:
    if isinstance(u.sharding, NamedSharding):
        return u.sharding
    raise ShardingError(
        f"an UnevenArray of shape {u.shape} has no known mesh; shard it: iso.reshard(u, mesh, spec)"
    )


def _devices(sharding: Any) -> Any:
    return mesh_of(sharding).devices.flat if isinstance(sharding, NamedSharding) else ()
