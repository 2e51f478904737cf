"""The meshes over a machine that a search tries: few, with the usual axis names.

>>> from isoshard.planner.machine.topologies import topology
>>> [tuple(mesh.shape.items()) for mesh in meshes_of(topology("v5e:4x4"))]
[(('data', 16),), (('data', 4), ('model', 4)), (('data', 2), ('model', 8)), (('data', 8), ('model', 2))]
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from isoshard.core.kit import ShardingError, auto

from ..machine.topologies import Topology, topology, topology_of

NAMES = ("data", "model", "expert")
_WIDEST = 64
_SHAPES = 5
Where = Mesh | Topology | str | int
"""A mesh, a machine or its text, or how many devices."""


def meshes_for(where: Where, experts: int = 1) -> list[Mesh]:
    """The meshes that a search tries.

    Args:
        where: a mesh, which is then the only one, with Auto axes for Explicit ones; of a machine,
            or of a number of devices, several.
        experts: of a mixture; they may have a mesh axis of their own.

    Raises:
        ShardingError: there is no such machine, or no such number of devices.
    """
    if isinstance(where, Mesh):
        machine = topology_of(where)
        if where.size > machine.size:
            raise ShardingError(
                f"the mesh has {where.size} devices, and {machine.name} has {machine.size}"
            )
        return [auto(where)]
    if isinstance(where, str):
        return meshes_of(topology(where), experts)
    if isinstance(where, Topology):
        return meshes_of(where, experts)
    if isinstance(where, int) and where > 0:
        if where <= jax.device_count():
            return _of_devices(where, experts)
        return meshes_of(topology(f"cpu:{where}"), experts)
    raise ShardingError(
        f"{where!r} is neither a mesh, a topology such as 'v5e:16x16', nor a number of devices"
    )


def meshes_of(machine: Topology, experts: int = 1) -> list[Mesh]:
    """The meshes over all of a machine, those that fit its links best first."""
    meshes = []
    for shape, names in _shapes(machine.size, _inside(machine), experts):
        try:
            meshes.append(machine.mesh(shape, names))
        except ShardingError:  # the slices, or the grid, do not go with this shape
            continue
    return meshes


def _of_devices(count: int, experts: int) -> list[Mesh]:
    devices = np.array(jax.devices()[:count])
    return [
        Mesh(devices.reshape(shape), names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
        for shape, names in _shapes(count, (count,), experts)
    ]


def _inside(machine: Topology) -> Sequence[int]:
    """Sizes of groups of neighbouring devices: full axes of a torus, or one host."""
    if not machine.chip.links:
        return (machine.per_host,)
    return [math.prod(machine.shape[n:]) for n in range(len(machine.shape))]


def _shapes(
    count: int, inside: Iterable[int], experts: int
) -> Iterable[tuple[tuple[int, ...], tuple[str, ...]]]:
    yield (count,), NAMES[:1]
    close = [width for width in inside if 1 < width < count]
    powers = [width for width in (8, 16, 4, 32, 2, 64) if width < count]
    widths = [width for width in dict.fromkeys([*close, *powers]) if width <= _WIDEST]
    widths = [width for width in widths if count % width == 0][:_SHAPES]
    for width in widths:
        yield (count // width, width), NAMES[:2]
    for width in widths[:2]:
        share = math.gcd(experts, count // width)
        if share > 1 and count // width > share:
            yield (count // width // share, share, width), (NAMES[0], NAMES[2], NAMES[1])
