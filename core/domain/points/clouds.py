"""Clouds: points and queries, rows of coordinates in one space and on one mesh.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> points = shard(np.zeros((8, 3), np.float32), make_mesh((4,), ("x",)), P("x"))
>>> rows = read_clouds({"points": points, "queries": points}, None, None)
>>> rows["points"].axes, rows["queries"].sizes
(('x',), (2, 2, 2, 2))
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.domain.blocks.known_shardings import known_sharding_of, sharding_of
from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import as_mesh
from isoshard.core.layout.uneven import UnevenArray, padded_of

from .row_splits import RowSplit, entries, read_rows

ONE = "points"
"""The name of the only axis of the mesh that stands for one device."""


def read_clouds(given: dict[str, Any], mesh: Any, axes: Any) -> dict[str, RowSplit]:
    """Read arrays of points, and find the mesh that all of them are on.

    Args:
        given: float[rows, coordinates] by name: jax.Arrays or UnevenArrays.
        mesh: the mesh, or None to take that of the arrays.
        axes: for each of them the mesh axes that split its rows: a name, a tuple of names or None;
            or None to take those of the arrays.

    Returns:
        The split of the rows of each, by name.

    Raises:
        ShardingError: they are no points of one space on one mesh; all faults in one message.
        TypeError: one is no array.
    """
    for name, value in given.items():
        if not isinstance(padded_of(value), jax.Array):
            raise TypeError(
                f"{name} are rows of coordinates in a jax.Array or an UnevenArray; given was "
                f"{type(value).__name__}. Lay them out first: iso.shard(x, mesh, spec)."
            )
    found = _mesh(given) if mesh is None else as_mesh(mesh, abstract=True)
    faults = [fault for name, value in given.items() for fault in _faults(name, value)]
    told = _told(given, axes, faults)
    rows = {
        name: read_rows(name, value, found, told[name], faults) for name, value in given.items()
    }
    widths = {name: value.shape[-1] for name, value in given.items() if value.ndim == 2}
    if len(set(widths.values())) > 1:
        each = ", ".join(f"{width} for {name}" for name, width in widths.items())
        faults.append(f"they are of one space, and have other numbers of coordinates: {each}")
    if faults:
        raise ShardingError(f"{' and '.join(given)} do not fit: {'; '.join(faults)}.")
    return rows


def _mesh(given: dict[str, Any]) -> Any:
    layouts = {name: sharding_of(value) for name, value in given.items()}
    for layout in layouts.values():
        if isinstance(layout, NamedSharding):
            return layout.mesh
    traced = [name for name, layout in layouts.items() if layout is None]
    devices = {device for one in layouts.values() if one is not None for device in one.device_set}
    if traced or len(devices) != 1:
        why = (
            f"inside jax.jit {' and '.join(traced)} have no layout yet"
            if traced
            else f"they are on {len(devices)} devices without a mesh"
        )
        raise ShardingError(
            f"{' and '.join(given)} do not tell on which mesh they lie: {why}. Say mesh= and "
            "axes=, the mesh axes that split the rows of each, such as axes=('x', 'x'), or lay "
            "arrays out with iso.shard(x, mesh, spec)."
        )
    return Mesh(np.array(list(devices), object), (ONE,), axis_types=(AxisType.Auto,))


def _faults(name: str, value: Any) -> list[str]:
    faults = []
    if value.ndim != 2 or value.shape[1] == 0:
        faults.append(f"{name} of shape {value.shape} are not rows of coordinates")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        faults.append(f"{name} are {value.dtype}, and coordinates are floating-point numbers")
    if isinstance(value, UnevenArray) and any(size is not None for size in value.sizes[1:]):
        faults.append(f"{name} are padded along their coordinates: {value!r}")
    if isinstance(known_sharding_of(value), NamedSharding) and any(entries(value)[1:]):
        faults.append(
            f"{name} are split along their coordinates by {sharding_of(value).spec}: lay them out "
            f"by rows, iso.reshard({name}, {P(entries(value)[0] or None)})"
        )
    return faults


def _told(given: dict[str, Any], axes: Any, faults: list[str]) -> dict[str, Any]:
    """The spec said for the rows of each, or None."""
    if axes is None:
        return dict.fromkeys(given)
    if not isinstance(axes, tuple | list) or len(axes) != len(given):
        faults.append(
            f"axes={axes!r} are not the mesh axes of {' and '.join(given)}: give "
            f"{len(given)}, each a name, a tuple of names or None"
        )
        return dict.fromkeys(given)
    return {name: P(axis) for name, axis in zip(given, axes, strict=True)}
