"""Meshes for tiles: the part of a mesh that some devices are, or a mesh made to fit.

>>> tiles = [Tiles([[0, 1], [2, 3]]), Tiles([[[0, 2], [1, 3]]])]
>>> found = fitting_mesh(tiles, [0, 1, 2, 3], jax.devices()[:4])
>>> dict(found.mesh.shape), [one.to_spec(found.mesh) for one in tiles]
({'d0': 2, 'd1': 2}, [P('d0',), P(None, 'd1')])

Nothing is searched: the runs of device numbers along each axis of each layout say where mesh axes
must end, and if those places divide each other, they are the mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from isoshard.core.kit import (
    Device,
    DeviceError,
    Tiles,
    UnrepresentableError,
    describe_mesh,
    digits,
    make_mesh,
)

from ..errors import AnnotationError

_MOST_ORDERS = 16  # of devices that are tried


class NumberedMesh(NamedTuple):
    """A mesh, and what a file calls its devices.

    Attributes:
        mesh: that of the user or part of it, with its axis types; else as `make_mesh` makes it.
        device_ids: of each device of the flattened mesh, in the file.
    """

    mesh: Mesh
    device_ids: tuple[int, ...]


def renumbered(tiles: Tiles, device_ids: Sequence[int]) -> Tiles:
    """Number the devices of a layout from 0.

    Example:
        >>> renumbered(Tiles([[4], [6]], num_devices=8), [4, 6])
        Tiles([[0], [1]])
    """
    index_of = {device_id: at for at, device_id in enumerate(device_ids)}
    grid = np.vectorize(index_of.__getitem__, otypes=[np.int64])(tiles.grid)
    return Tiles(grid, len(device_ids))


def fitting_mesh(
    tiles: Sequence[Tiles], device_ids: Sequence[int], devices: Sequence[Device]
) -> NumberedMesh:
    """Make the coarsest mesh over which every layout is a spec; its axes are d0, d1, ..

    Example:
        >>> fitting_mesh([Tiles([[3], [1], [2], [0]])], range(4), jax.devices()[:4]).device_ids
        (3, 1, 2, 0)
    """
    device_by_id = dict(zip(device_ids, devices, strict=True))
    tiles = list(dict.fromkeys(tiles))
    for order in (list(device_ids), *(tile.grid.ravel().tolist() for tile in tiles[:_MOST_ORDERS])):
        numbered = [renumbered(tile, order) for tile in tiles]
        shape = _nested(numbered, len(order))
        if shape is not None:
            names = tuple(f"d{axis}" for axis in range(len(shape)))
            placed = [device_by_id[device_id] for device_id in order]
            mesh = make_mesh(shape, names, devices=placed)
            if all(fits(tile, mesh) for tile in numbered):
                return NumberedMesh(mesh, tuple(order))
    kinds = "; ".join(str(tile.grid.tolist()) for tile in tiles[:_MOST_ORDERS])
    raise AnnotationError(
        f"no mesh of {len(device_ids)} devices has axes that these layouts follow all: {kinds}. "
        "Give them one order of devices, whose runs divide each other."
    )


def fits(tiles: Tiles, mesh: Mesh) -> bool:
    """Whether a spec over the mesh expresses these tiles.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> fits(Tiles([[0], [2], [1], [3]]), make_mesh((4,), ("x",)))
        False
    """
    try:
        tiles.to_spec(mesh)
    except UnrepresentableError:
        return False
    return True


def submesh(mesh: Mesh, device_ids: Sequence[int]) -> NumberedMesh:
    """The part of a mesh that some of its devices are.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> part = submesh(make_mesh((2, 4), ("stage", "model")), [4, 5, 6, 7])
        >>> dict(part.mesh.shape), part.device_ids
        ({'model': 4}, (4, 5, 6, 7))
    """
    if len(device_ids) == mesh.size:
        return NumberedMesh(mesh, tuple(range(mesh.size)))
    shape = mesh.devices.shape
    coordinates = [np.unique(at) for at in np.unravel_index(np.array(device_ids), shape)]
    if math.prod(map(len, coordinates)) != len(device_ids):
        raise AnnotationError(
            f"devices {sorted(device_ids)} are no submesh of {describe_mesh(mesh)}; annotate full "
            "rows of it, or pass another mesh"
        )
    keep = [len(indices) > 1 or size == 1 for indices, size in zip(coordinates, shape, strict=True)]
    devices = mesh.devices[np.ix_(*coordinates)]
    sizes = [size for size, keeps_axis in zip(devices.shape, keep, strict=True) if keeps_axis]
    names = tuple(itertools.compress(mesh.axis_names, keep))
    if not names:
        sizes, names = [1], mesh.axis_names[:1]
    kinds = tuple(mesh.axis_types[mesh.axis_names.index(name)] for name in names)
    return NumberedMesh(
        Mesh(devices.reshape(sizes), names, axis_types=kinds), tuple(sorted(device_ids))
    )


def numbered_devices(device_ids: Sequence[int]) -> list[Device]:
    """The devices of this process's JAX by position in `jax.devices()`."""
    devices = jax.devices()
    need = max(device_ids) + 1
    if need > len(devices):
        raise DeviceError(
            f"the annotations name device {need - 1}, there are {len(devices)} "
            f"({devices[0].platform}). Pass a mesh of your own, or try it on virtual devices: call "
            f"iso.simulate_devices({need}) before anything else."
        )
    return [devices[device_id] for device_id in device_ids]


def _nested(tiles: Sequence[Tiles], count: int) -> tuple[int, ...] | None:
    """The sizes between the ends of all runs, or None if those do not divide each other."""
    ends = {1, count}
    for tile in tiles:
        grid = np.sort(tile.grid, axis=-1)
        for axis in range(grid.ndim):
            at: list[int | slice] = [0] * grid.ndim
            at[axis] = slice(None)
            for size, step in digits(grid[tuple(at)]):
                ends |= {step, step * size} if size > 1 else set()
    if min(ends) < 1:
        return None
    ordered = sorted(ends)
    steps = list(itertools.pairwise(ordered))
    if any(big % small for small, big in steps):
        return None
    return tuple(big // small for small, big in reversed(steps)) or (1,)
