"""The one mesh that the arrays of a tree are on; if there are several, which is on which.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.place import shard
>>> rows, grid = make_mesh((8,), ("x",)), jax.make_mesh((2, 4), ("x", "y"))
>>> w, b = shard(jax.numpy.ones((8, 8)), grid, ("x", "y")), shard(jax.numpy.ones(8), grid, ("y",))
>>> one_mesh({"w": w, "b": b}) == grid
True
>>> one_mesh({"w": w, "b": b, "table": shard(jax.numpy.ones(8), rows, ("x",))})    # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
isoshard.core.errors.ShardingError: the arrays lie on 2 different meshes: b, w on 'x' (2), 'y' (4) (Explicit) of devices 0, 1, ...; table on 'x' (8) (Auto) of devices ... Say which one to lay them out on: iso.reshard(x, mesh, spec)
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from isoshard.core.errors import ShardingError
from isoshard.core.runtime._jax_internals.tracers import Tracer

from .leaf_paths import path_name
from .mesh import ambient_mesh, describe_mesh


def one_mesh(x: Any) -> Any:
    """The mesh that the arrays of a tree are on.

    Args:
        x: the tree; its arrays also traced, or structs.

    Returns:
        Their mesh; if they are on none, what `jax.set_mesh` has set.

    Raises:
        ShardingError: they are on several, or on none and none is set.
    """
    meshes: dict[Any, list[str]] = {}
    for path, leaf in jax.tree.leaves_with_path(x):
        is_traced = isinstance(leaf, Tracer)
        if not is_traced and not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            continue
        sharding = jax.typeof(leaf).sharding if is_traced else leaf.sharding
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            meshes.setdefault(sharding.mesh, []).append(path_name(path) or "the array")
    if not meshes:
        return ambient_mesh("iso.reshard(x, mesh, spec)")
    if len(meshes) > 1:
        told = "; ".join(f"{_some(names)} on {_typed(mesh)}" for mesh, names in meshes.items())
        raise ShardingError(
            f"the arrays lie on {len(meshes)} different meshes: {told}. Say which one to lay them "
            "out on: iso.reshard(x, mesh, spec)"
        )
    return next(iter(meshes))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown


def _typed(mesh: Any) -> str:
    """A mesh in words: its axes, their types, and its devices where these may tell it apart."""
    kinds = ", ".join(dict.fromkeys(kind.name for kind in mesh.axis_types))
    told = f"{describe_mesh(mesh)} ({kinds})"
    if isinstance(mesh, AbstractMesh):
        return told
    ids = [device.id for device in mesh.devices.flat]
    return f"{told} of devices {', '.join(map(str, ids[:8]))}{', ..' if len(ids) > 8 else ''}"
