"""What `shard` is given beside `x`, where that is more than a mesh and a spec."""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import ambient_mesh, as_mesh, describe_mesh

LEFT_OUT: Any = object()


def mesh_and_spec(mesh: Any, spec: Any) -> tuple[Any, Any]:
    """Both, where one may have been left out."""
    if spec is LEFT_OUT:
        if isinstance(mesh, Mesh | AbstractMesh) or hasattr(mesh, "get_jax_mesh"):
            raise TypeError(
                f"how is it to lie over the mesh {describe_mesh(as_mesh(mesh, abstract=True))}? "
                "Give a spec as well: iso.shard(x, mesh, P('x')), or P() for whole copies"
            )
        mesh, spec = None, mesh
    if mesh is None:
        mesh = spec.mesh if isinstance(spec, NamedSharding) else ambient_mesh()
    return mesh if isinstance(mesh, Mesh) else as_mesh(mesh, abstract=True), spec


def check_uneven(uneven: str, sizes: Any, memory: str | None) -> None:
    """Raise for options that are unknown, or that do not go together."""
    if uneven not in ("error", "pad"):
        raise ShardingError(f"uneven is 'error' or 'pad', given was {uneven!r}")
    if uneven == "error" and sizes is not None:
        raise ShardingError(
            f"sizes {sizes} are of blocks with padding; say that it is wanted: "
            "iso.shard(x, mesh, spec, uneven='pad', sizes=..)"
        )
    if uneven == "pad" and memory is not None:
        raise ShardingError(
            f"memory={memory!r} with uneven='pad': blocks of other sizes rest in the memory that "
            "their devices compute in. Leave one of the two out."
        )
