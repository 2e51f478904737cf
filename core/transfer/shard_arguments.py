"""Checks of the arguments of `shard`: mesh and spec with defaults, and padding options."""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import ambient_mesh, as_mesh, describe_mesh

MISSING: Any = object()


def mesh_and_spec(mesh: Any, spec: Any) -> tuple[Any, Any]:
    """The mesh and the spec, where either may be missing."""
    if spec is MISSING:
        if isinstance(mesh, Mesh | AbstractMesh) or hasattr(mesh, "get_jax_mesh"):
            raise TypeError(
                f"there is no spec for the mesh {describe_mesh(as_mesh(mesh, abstract=True))}; "
                "pass one: iso.shard(x, mesh, P('x')), or P() to replicate"
            )
        mesh, spec = None, mesh
    if mesh is None:
        mesh = spec.mesh if isinstance(spec, NamedSharding) else ambient_mesh()
    return mesh if isinstance(mesh, Mesh) else as_mesh(mesh, abstract=True), spec


def check_uneven(uneven: str, sizes: Any, memory: str | None) -> None:
    """Raise for unknown or incompatible options."""
    if uneven not in ("error", "pad"):
        raise ShardingError(f"uneven is 'error' or 'pad', not {uneven!r}")
    if uneven == "error" and sizes is not None:
        raise ShardingError(
            f"sizes {sizes} are of blocks with padding, which needs uneven='pad': "
            "iso.shard(x, mesh, spec, uneven='pad', sizes=..)"
        )
    if uneven == "pad" and memory is not None:
        raise ShardingError(
            f"memory={memory!r} with uneven='pad' is not supported: padded blocks are stored in "
            "device memory. Leave one of the two out."
        )
