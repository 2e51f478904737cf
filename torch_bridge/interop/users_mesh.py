"""The mesh with Explicit axes of values that cross between the frameworks.

Torch code is computed under Auto axes. Its arguments come from the user's mesh and its results go
back there: the mesh is that of the arguments, else the one that `jax.set_mesh` has set.

>>> mesh = jax.make_mesh((8,), ("x",))
>>> x = jax.device_put(jax.numpy.ones(8), NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
>>> users_mesh({"x": x}, "f") == mesh, users_mesh({"x": jax.numpy.ones(8)}, "f")
(True, None)
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import AnyMesh, auto, is_typed, same_grid
from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.layout.mesh import ambient_mesh
from isoshard.core.layout.spec_entries import axis_names, entries_of
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.formatting import listed
from isoshard.core.transfer.exchange import reshard_array
from isoshard.torch_bridge.common.argument_types import Leaf, PyTree
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values import sharding_ids


def users_mesh(arguments: PyTree, name: str) -> AnyMesh | None:
    """The mesh with Explicit axes that arguments are on, or that `jax.set_mesh` has set.

    Args:
        arguments: a pytree; arrays, also traced, and tensors on the `jax` device count.
        name: of the function that is called, for messages.

    Returns:
        The mesh; in a JAX transformation it may be abstract. None if there is none.

    Raises:
        ShardingError: arguments are on other meshes.
    """
    leaves = jax.tree.leaves(arguments)
    meshes = {mesh: None for mesh in map(mesh_of_leaf, leaves) if mesh is not None}
    typed = [mesh for mesh in meshes if is_typed(mesh)]
    if not typed and is_typed(jax.sharding.get_abstract_mesh()):
        typed = [ambient_mesh()]
    if not typed:
        return None
    mesh = min(typed, key=lambda candidate: isinstance(candidate, jax.sharding.Mesh))
    if not all(_is_compatible(other, mesh) for other in meshes):
        raise _different_meshes(arguments, name)
    return mesh


def mesh_of_leaf(leaf: Leaf) -> AnyMesh | None:
    """The mesh that an array, a traced value or a tensor is known to be on."""
    if isinstance(leaf, lazy_tensor.LazyTensor):
        return sharding_ids.typed_mesh(leaf._storage.value.layout)
    if isinstance(leaf, Tracer):
        mesh = jax.typeof(leaf).sharding.mesh
        return None if mesh.empty else mesh
    if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
        return leaf.sharding.mesh
    return None


def under_auto_axes(mesh: AnyMesh | None = None) -> contextlib.AbstractContextManager[Any]:
    """Context in which JAX computes under Auto axes.

    Args:
        mesh: the grid; by default that of the mesh which is set.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh.abstract_mesh
    return jax.sharding.use_abstract_mesh(auto(mesh)) if is_typed(mesh) else _AS_IT_IS


_AS_IT_IS = contextlib.nullcontext()


def of_type(value: Leaf, sharding: NamedSharding) -> Any:
    """A value in a type; along Auto axes it stays as it is.

    Args:
        value: an array, also traced, under Auto axes or on no mesh.
        sharding: over the user's mesh.
    """
    if isinstance(value, Tracer):
        spec = explicit_spec(sharding.spec, sharding.mesh)
        return jax.sharding.reshard(value, NamedSharding(sharding.mesh, spec))
    return reshard_array(value, sharding) if isinstance(sharding.mesh, jax.sharding.Mesh) else value


def explicit_spec(spec: P, mesh: AnyMesh) -> P:
    """The entries of a spec for the Explicit axes of a mesh.

    Example:
        >>> both = (AxisType.Explicit, AxisType.Auto)
        >>> explicit_spec(P(("x", "y"), "y"), jax.make_mesh((2, 4), ("x", "y"), both))
        P('x', None)
    """
    if mesh.are_all_axes_explicit:
        return spec
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    entries = [
        tuple(name for name in axis_names(entry) if kinds[name] == AxisType.Explicit) or None
        for entry in entries_of(spec)
    ]
    return P(*entries)


def describe_mesh(mesh: AnyMesh) -> str:
    """A mesh in a few words, with the types of its axes.

    Example:
        >>> describe_mesh(jax.make_mesh((2, 4), ("x", "y")))
        "'x' (2, Explicit), 'y' (4, Explicit)"
    """
    kinds = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    return ", ".join(f"{name!r} ({size}, {kind.name})" for (name, size), kind in kinds)


def _is_compatible(mesh: AnyMesh, other: AnyMesh) -> bool:
    """Whether values of both can be computed together: one grid, and one set of Explicit axes."""
    if not same_grid(mesh, other):
        return False
    pairs = {*zip(mesh.axis_types, other.axis_types, strict=True)}
    mixed = {(AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)}
    return not (is_typed(mesh) and is_typed(other) and pairs & mixed)


def _different_meshes(arguments: Any, name: str) -> ShardingError:
    names_by_mesh: dict[str, list[str]] = {}
    for path, leaf in jax.tree.leaves_with_path(arguments):
        mesh = mesh_of_leaf(leaf)
        if mesh is not None:
            names_by_mesh.setdefault(_with_devices(mesh), []).append(path_name(path))
    if len(names_by_mesh) == 1:
        names_by_mesh[f"{_with_devices(ambient_mesh())} (set by jax.set_mesh)"] = []
    where = "; ".join(f"{listed(names, _SHOWN)} on {mesh}" for mesh, names in names_by_mesh.items())
    return ShardingError(
        f"{name}: the arguments are on different meshes: {where}. Reshard them to one: "
        "iso.reshard(x, mesh, spec)"
    )


_SHOWN = 5


def _with_devices(mesh: AnyMesh) -> str:
    if not isinstance(mesh, jax.sharding.Mesh):
        return describe_mesh(mesh)
    devices = [device.id for device in mesh.devices.flat]
    shown = ", ".join(map(str, devices[:8])) + (", .." if len(devices) > 8 else "")
    return f"{describe_mesh(mesh)} of devices {shown}"
