"""The arguments of `shard` and `reshard`: those left out, in an old order, or in conflict."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh, NamedSharding

from isoshard.core.deprecations import NewCall
from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import ambient_mesh, as_mesh, describe_mesh, is_mesh

LEFT_OUT: Any = object()


def mesh_and_spec(mesh: Any, spec: Any) -> tuple[Any, Any]:
    """Both, where one may have been left out."""
    if spec is LEFT_OUT:
        mesh, spec = None, _spec_alone(mesh, "iso.shard")
    if mesh is None:
        mesh = spec.mesh if isinstance(spec, NamedSharding) else ambient_mesh()
    return mesh if isinstance(mesh, Mesh) else as_mesh(mesh, abstract=True), spec


def new_mesh_and_spec(mesh: Any, spec: Any) -> tuple[Any, Any]:
    """Both for `reshard`, where the mesh may be left out: it is None then, or that of `spec`."""
    if spec is LEFT_OUT:
        mesh, spec = None, _spec_alone(mesh, "iso.reshard")
    elif mesh is LEFT_OUT:
        mesh = None
    if mesh is None and isinstance(spec, NamedSharding):
        mesh = spec.mesh
    return mesh, spec


def _spec_alone(spec: Any, verb: str) -> Any:
    if spec is LEFT_OUT:
        raise TypeError(f"{verb} needs a spec: {verb}(x, P('x')), or {verb}(x, mesh, P('x'))")
    if is_mesh(spec):
        raise TypeError(
            f"there is no spec for the mesh {describe_mesh(as_mesh(spec, abstract=True))}; "
            f"pass one: {verb}(x, mesh, P('x')), or P() to replicate"
        )
    return spec


def mesh_last(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NewCall | None:
    """The new form of a call with the mesh after the spec, which was the order of `reshard`."""
    old, new = f"{name}(x, spec, mesh)", f"{name}(x, mesh, spec)"
    if len(args) == 2 and "mesh" in kwargs:
        rest = {key: value for key, value in kwargs.items() if key != "mesh"}
        return NewCall((args[0], kwargs["mesh"], args[1]), rest, old, new)
    if len(args) == 3 and not is_mesh(args[1]):
        if is_mesh(args[2]) or (args[2] is None and args[1] is not None):
            return NewCall((args[0], args[2], args[1]), kwargs, old, new)
    return None


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
