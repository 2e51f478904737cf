"""The order of devices in a mesh, and the mesh of `jax.set_mesh`."""

from __future__ import annotations

from collections.abc import Callable

from jax.sharding import Mesh

from .declared import NAMES

DEVICE_MESH = NAMES.state(
    "jax.experimental.mesh_utils.create_device_mesh",
    why="arranges the devices of a machine that is described, not attached",
    without="planning for TPUs raises",
)

HYBRID_MESH = NAMES.state(
    "jax.experimental.mesh_utils.create_hybrid_device_mesh",
    why="arranges the devices of several slices",
    without="`iso.hybrid_mesh` raises on several slices, as does planning for them",
)

get_mesh: Callable[[], Mesh] = NAMES.bind(
    "jax.sharding.get_mesh",
    why="has the devices of the mesh that `jax.set_mesh` set",
    without="calls that take their mesh from `jax.set_mesh` raise: pass the mesh",
)
