"""Meshes of several shapes over the same devices, as one finer mesh.

A program may read tensors sharded over a mesh (2, 4) and others on a mesh (8,) of the same devices
in the same order. JAX describes what XLA chooses for a result in the axes of one mesh only, so
such a program gets its inputs on a mesh whose axes are fine enough for all of them. Users see each
tensor on their own mesh (`sharding_ids.restated_on`).

>>> common_shape([(2, 4), (8,), (4, 2)])
(2, 2, 2)
>>> common_shape([(2, 3), (3, 2)]) is None          # no axis of one is made of axes of the other
True
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime.caches import PROGRAMS, Bounded

from . import sharding_ids

_REFINED: Bounded[frozenset[int], dict[int, int]] = Bounded(PROGRAMS, "engine: common meshes")


def refine(layout_ids: Iterable[int]) -> dict[int, int]:
    """Write layouts in the axes of one mesh.

    Returns:
        A layout for each layout that has to change; empty if they are on one mesh already.

    Raises:
        ShardingError: the meshes have no common refinement, such as (2, 3) and (3, 2).
    """
    key = frozenset(layout_ids)
    finer = _REFINED.get(key)
    if finer is None:
        finer = _REFINED[key] = _refine(key)
    return finer


_FINER: contextvars.ContextVar[dict[int, int]] = contextvars.ContextVar("finer")


@contextlib.contextmanager
def refining(layout_ids: Iterable[int]) -> Iterator[None]:
    """While a program that names these layouts is traced, let `refined` translate them."""
    groups = {layout_id: sharding_ids.devices(layout_id) for layout_id in layout_ids}
    most = max(groups.values(), key=len, default=())
    token = _FINER.set(refine(layout_id for layout_id, group in groups.items() if group == most))
    try:
        yield
    finally:
        _FINER.reset(token)


def refined(layout_id: int) -> int:
    """A layout in the axes of the one mesh of the program being traced, if that is another."""
    return _FINER.get({}).get(layout_id, layout_id)


def common_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The coarsest mesh shape of which every axis of every shape is a run of axes, or None."""
    boundaries = sorted({step for shape in shapes for step in (math.prod(shape), *_strides(shape))})
    if any(big % small for small, big in itertools.pairwise(boundaries)):
        return None
    return tuple(big // small for small, big in itertools.pairwise(boundaries))[::-1]


def _strides(shape: Sequence[int]) -> list[int]:
    """The stride of each axis in the flattened mesh."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _refine(layout_ids: frozenset[int]) -> dict[int, int]:
    named = {
        layout_id: value
        for layout_id in layout_ids
        if isinstance(value := sharding_ids.sharding(layout_id), NamedSharding)
    }
    meshes = {mesh_of(value) for value in named.values()}
    if len(meshes) < 2:
        return {}
    shapes = sorted({tuple(mesh.devices.shape) for mesh in meshes})
    shape = common_shape(shapes)
    if shape is None:
        raise ShardingError(
            f"one program cannot use meshes of shapes {' and '.join(map(str, shapes))}: the axes "
            "of one are not made of axes of the other. Mark the tensors with one mesh, or move "
            "some with isoshard.reshard(tensor, mesh, spec)."
        )
    flat = next(iter(meshes)).devices.reshape(-1)
    names = tuple(f"axis{index}" for index in range(len(shape)))
    fine = Mesh(np.asarray(flat).reshape(shape), names)
    return {
        layout_id: _computed_on(layout_id, _on(value, fine)) for layout_id, value in named.items()
    }


def _computed_on(layout_id: int, value: NamedSharding) -> int:
    """A layout that programs have in the axes of another mesh; blocks are unchanged."""
    blocks = sharding_ids.blocks(layout_id)
    return sharding_ids.computed_as(value if blocks is None else blocks.on(value), layout_id)


def _on(value: NamedSharding, fine: Mesh) -> NamedSharding:
    mesh = mesh_of(value)
    strides = dict(zip(fine.axis_names, _strides(fine.devices.shape), strict=True))
    covers = {
        name: tuple(axis for axis, at in strides.items() if step <= at < step * size)
        for name, size, step in zip(
            mesh.axis_names, mesh.devices.shape, _strides(mesh.devices.shape), strict=True
        )
    }
    spec = [
        tuple(
            axis
            for name in (() if entry is None else (entry,) if isinstance(entry, str) else entry)
            for axis in covers[name]
        )
        for entry in value.spec
    ]
    entries = PartitionSpec(*(entry or None for entry in spec))
    return NamedSharding(fine, entries, memory_kind=value.memory_kind)


def rewrap(array: jax.Array | UnevenArray, layout_id: int) -> jax.Array | UnevenArray:
    """The same buffers under an equal layout that is written otherwise."""
    blocks = sharding_ids.blocks(layout_id)
    if isinstance(array, UnevenArray):
        return blocks.wrap(_rewrapped(array.array, layout_id)) if blocks else array
    return _rewrapped(array, layout_id)


def _rewrapped(array: jax.Array, layout_id: int) -> jax.Array:
    shards = [shard.data for shard in array.addressable_shards]
    with jax.enable_x64(True):
        return jax.make_array_from_single_device_arrays(
            array.shape, sharding_ids.sharding(layout_id), shards, dtype=array.dtype
        )
