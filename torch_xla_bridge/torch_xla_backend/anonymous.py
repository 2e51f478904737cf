"""Shardings without a mesh: torch_xla reports the block of each device, without axis names.

>>> by_itself(Tiles([[0, 4], [1, 5], [2, 6], [3, 7]]))
NamedSharding(mesh=Mesh('replica': 2, 'dim0': 4, axis_types=(Auto, Auto)), spec=P('dim0',), \
memory_kind=device)
"""

from __future__ import annotations

import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import Tiles, digits, make_mesh, named_sharding

from .backend_mesh import device_by_id


def by_itself(tiles: Tiles) -> NamedSharding:
    """The layout over a mesh made for it.

    The mesh has an axis for each tensor axis that is split, and one for replicas (or several, where
    the device numbers run in several strides). Its devices are in their own order, as far as the
    layout is a transposed count: JAX computes with arrays of such meshes together.
    """
    sharding = _in_device_order(tiles)
    if sharding is not None and Tiles.from_sharding(sharding, tiles.ndim) == tiles:
        return sharding
    split = [axis for axis, count in enumerate(tiles.blocks) if count > 1]
    names = [*(f"dim{axis}" for axis in split), "replica"]
    sizes = [*(tiles.blocks[axis] for axis in split), tiles.replicas]
    devices = [device_by_id(int(device_id)) for device_id in tiles.grid.ravel()]
    spec = P(*(f"dim{axis}" if axis in split else None for axis in range(tiles.ndim)))
    return named_sharding(spec, make_mesh(sizes, names, devices=devices), tiles.ndim)


def _in_device_order(tiles: Tiles) -> NamedSharding | None:
    axes: list[tuple[int, int, str]] = []  # stride, size, name
    entries: list[tuple[str, ...]] = []
    for axis in range(tiles.grid.ndim):
        line = np.moveaxis(tiles.grid, axis, -1).reshape(-1, tiles.grid.shape[axis])[0]
        runs = digits(line) if len(line) > 1 else []
        name = f"dim{axis}" if axis < tiles.ndim else "replica"
        names = [name] if len(runs) == 1 else [f"{name}_{index}" for index in range(len(runs))]
        axes += [(stride, size, name) for (size, stride), name in zip(runs, names, strict=True)]
        entries.append(tuple(names))
    axes.sort(reverse=True)
    sizes = [size for _, size, _ in axes] or [1]
    if int(np.prod(sizes)) != tiles.num_devices:
        return None
    devices = [device_by_id(device_id) for device_id in range(tiles.num_devices)]
    mesh = make_mesh(sizes, [name for *_, name in axes] or ["replica"], devices=devices)
    return named_sharding(tuple(entry or None for entry in entries[:-1]), mesh, tiles.ndim)
