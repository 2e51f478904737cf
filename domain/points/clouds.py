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

from isoshard.core.kit import (
    ShardingError,
    UnevenArray,
    as_mesh,
    closed_sharding_of,
    padded_of,
    sharding_of,
)

from .row_splits import RowSplit, entries, read_rows

DEVICE_AXIS = "points"
"""The only axis of the mesh of a single device."""


def read_clouds(clouds: dict[str, Any], mesh: Any, axes: Any) -> dict[str, RowSplit]:
    """Read arrays of points, and find the mesh that all of them are on.

    Raises:
        ShardingError: they are no points of one space on one mesh; all errors in one message.
        TypeError: a value is no array.
    """
    for name, value in clouds.items():
        if not isinstance(padded_of(value), jax.Array):
            raise TypeError(
                f"{name} are rows of coordinates in a jax.Array or an UnevenArray; got "
                f"{type(value).__name__}. Shard them first: iso.shard(x, mesh, spec)."
            )
    common_mesh = _mesh(clouds) if mesh is None else as_mesh(mesh, abstract=True)
    errors = [error for name, value in clouds.items() for error in _errors(name, value)]
    row_specs = _row_specs(clouds, axes, errors)
    rows = {
        name: read_rows(name, value, common_mesh, row_specs[name], errors)
        for name, value in clouds.items()
    }
    widths = {name: value.shape[-1] for name, value in clouds.items() if value.ndim == 2}
    if len(set(widths.values())) > 1:
        each = ", ".join(f"{width} for {name}" for name, width in widths.items())
        errors.append(f"they are of one space, and have other numbers of coordinates: {each}")
    if errors:
        raise ShardingError(f"{' and '.join(clouds)} do not fit: {'; '.join(errors)}.")
    return rows


def _mesh(clouds: dict[str, Any]) -> Any:
    layouts = {name: sharding_of(value) for name, value in clouds.items()}
    for layout in layouts.values():
        if isinstance(layout, NamedSharding):
            return layout.mesh
    traced = [name for name, layout in layouts.items() if layout is None]
    devices = {
        device for layout in layouts.values() if layout is not None for device in layout.device_set
    }
    if traced or len(devices) != 1:
        why = (
            f"inside jax.jit {' and '.join(traced)} have no sharding yet"
            if traced
            else f"they are on {len(devices)} devices without a mesh"
        )
        raise ShardingError(
            f"{' and '.join(clouds)} have no mesh: {why}. Pass mesh= and "
            "axes=, the mesh axes that split the rows of each, such as axes=('x', 'x'), or shard "
            "them with iso.shard(x, mesh, spec)."
        )
    return Mesh(np.array(list(devices), object), (DEVICE_AXIS,), axis_types=(AxisType.Auto,))


def _errors(name: str, value: Any) -> list[str]:
    errors = []
    if value.ndim != 2 or value.shape[1] == 0:
        errors.append(f"{name} of shape {value.shape} are not rows of coordinates")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        errors.append(f"{name} are {value.dtype}, and coordinates are floating-point numbers")
    if isinstance(value, UnevenArray) and any(size is not None for size in value.sizes[1:]):
        errors.append(f"{name} are padded along their coordinates: {value!r}")
    if isinstance(closed_sharding_of(value), NamedSharding) and any(entries(value)[1:]):
        errors.append(
            f"{name} are split along their coordinates by {sharding_of(value).spec}: shard them "
            f"by rows, iso.reshard({name}, {P(entries(value)[0] or None)})"
        )
    return errors


def _row_specs(clouds: dict[str, Any], axes: Any, errors: list[str]) -> dict[str, Any]:
    """The declared spec of the rows of each, or None."""
    if axes is None:
        return dict.fromkeys(clouds)
    if not isinstance(axes, tuple | list) or len(axes) != len(clouds):
        errors.append(
            f"axes={axes!r} are not the mesh axes of {' and '.join(clouds)}: give "
            f"{len(clouds)}, each a name, a tuple of names or None"
        )
        return dict.fromkeys(clouds)
    return {name: P(axis) for name, axis in zip(clouds, axes, strict=True)}
