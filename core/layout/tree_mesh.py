"""The common mesh of the arrays of a tree; if there are several, an error that lists them.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> rows, grid = make_mesh((8,), ("x",)), jax.make_mesh((2, 4), ("x", "y"))
>>> w, b = shard(jax.numpy.ones((8, 8)), grid, ("x", "y")), shard(jax.numpy.ones(8), grid, ("y",))
>>> common_mesh({"w": w, "b": b}) == grid
True
>>> common_mesh({"w": w, "b": b, "table": shard(jax.numpy.ones(8), rows, ("x",))})    # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
isoshard.core.errors.ShardingError: the arrays are on 2 different meshes: b, w on 'x' (2), 'y' (4) (Explicit) of devices 0, 1, ...; table on 'x' (8) (Auto) of devices ... Choose one: iso.reshard(x, spec, mesh)
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from isoshard.core.errors import ShardingError
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.formatting import listed

from .leaf_paths import path_name
from .mesh import ambient_mesh, describe_mesh


def common_mesh(x: Any) -> Any:
    """The mesh that the arrays of a tree are on.

    Args:
        x: the tree; its arrays also traced, or structs.

    Returns:
        Their mesh; if they are on none, the one that `jax.set_mesh` has set.

    Raises:
        ShardingError: they are on several meshes, or on none and none is set.
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
        return ambient_mesh("iso.reshard(x, spec, mesh)")
    if len(meshes) > 1:
        meshes_text = "; ".join(
            f"{listed(names, 4)} on {_mesh_text(mesh)}" for mesh, names in meshes.items()
        )
        raise ShardingError(
            f"the arrays are on {len(meshes)} different meshes: {meshes_text}. Choose one: "
            "iso.reshard(x, spec, mesh)"
        )
    return next(iter(meshes))


def _mesh_text(mesh: Any) -> str:
    """A mesh as text: its axes, their types, and its devices unless abstract."""
    kinds = ", ".join(dict.fromkeys(kind.name for kind in mesh.axis_types))
    text = f"{describe_mesh(mesh)} ({kinds})"
    if isinstance(mesh, AbstractMesh):
        return text
    ids = [device.id for device in mesh.devices.flat]
    return f"{text} of devices {', '.join(map(str, ids[:8]))}{', ..' if len(ids) > 8 else ''}"
