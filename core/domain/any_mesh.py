"""Verbs on meshes of every axis type: computed under Auto axes, given back on the caller's mesh.

>>> import jax.numpy as jnp
>>> from isoshard.core.place import shard
>>> @any_mesh
... def double(x):
...     print("inside:", jax.typeof(x))
...     return lies(x + x, sharding_of(x))
>>> x = shard(jnp.ones((8, 4)), jax.make_mesh((2, 4), ("x", "y")), P("x", "y"))
>>> jax.typeof(double(x))
inside: float32[8,4]
ShapedArray(float32[8@x,4@y])

The caller's mesh is the one that is given, else that of the first array on Explicit axes. What an
array on such axes tells by its type, a verb finds by `shardings.sharding_of`, also where `jax.jit`
traces it; there a verb says by `shardings.lies` how its results lie, which becomes their type. Of
an axis that it does not know, and of a result of which it says nothing, every device has all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..axis_types import AnyMesh, auto, constrain, is_typed, on_mesh, retyped, same_grid, under_auto
from ..entries import entries_of
from ..mesh import as_mesh
from ..uneven import UnevenArray, is_uneven, padded_of
from .shardings import lies as lies
from .shardings import sharding_of, telling

Given = ParamSpec("Given")
Made = TypeVar("Made")


def any_mesh(verb: Callable[Given, Made]) -> Callable[Given, Made]:
    """Let a verb take arrays, meshes and layouts with Explicit axes.

    Args:
        verb: of arrays, `UnevenArray`s, meshes and trees of them, under Auto axes.

    Returns:
        The verb. Arrays that come out lie on the caller's mesh; their gradients have the types of
        what went in. No byte is copied on either way.
    """

    @functools.wraps(verb)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_uneven)
        ambient = jax.sharding.get_abstract_mesh()
        meshes = [mesh for leaf in leaves if (mesh := _mesh_of(leaf)) is not None]
        if not is_typed(ambient) and not any(map(is_typed, meshes)):
            return verb(*args, **kwargs)
        mesh = _callers(leaves, meshes)
        told: list[tuple[Any, Any]] = []
        inside = jax.tree.unflatten(structure, [_entered(leaf, meshes, told) for leaf in leaves])
        with telling(told):
            with _under(ambient):
                made: Any = verb(*inside[0], **inside[1])
            if mesh is None or not is_typed(mesh):
                return made
            return jax.tree.map(lambda x: _left(x, mesh), made, is_leaf=is_uneven)

    return called


def _mesh_of(leaf: Any) -> AnyMesh | None:
    """The mesh that an argument is or lies on, with devices where they are known."""
    if isinstance(leaf, UnevenArray) and isinstance(leaf.layout, NamedSharding):
        return leaf.layout.mesh
    array = padded_of(leaf)
    if isinstance(array, Tracer):
        held = array.to_concrete_value()
        mesh = jax.typeof(array).sharding.mesh
        return (None if mesh.empty else mesh) if held is None else _mesh_of(held)
    if isinstance(array, jax.Array):
        return array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    return _given_mesh(leaf)


def _given_mesh(leaf: Any) -> AnyMesh | None:
    if isinstance(leaf, NamedSharding):
        return leaf.mesh
    is_mesh = isinstance(leaf, Mesh | AbstractMesh) or hasattr(leaf, "get_jax_mesh")
    return as_mesh(leaf, abstract=True) if is_mesh else None


def _callers(leaves: Sequence[Any], meshes: Sequence[AnyMesh]) -> AnyMesh | None:
    """The mesh that results are given back on."""
    for leaf in leaves:
        mesh = _given_mesh(leaf)
        if mesh is not None:
            return mesh
    mesh = next((mesh for mesh in meshes if is_typed(mesh)), None)
    return None if mesh is None else _with_devices(mesh, meshes)


def _with_devices(mesh: AnyMesh, others: Sequence[AnyMesh]) -> AnyMesh:
    """A mesh with the devices that another of its grid has; an array's type tells none."""
    if isinstance(mesh, Mesh):
        return mesh
    for other in others:
        if isinstance(other, Mesh) and same_grid(mesh, other):
            return Mesh(other.devices, other.axis_names, axis_types=mesh.axis_types)
    return mesh


def _entered(leaf: Any, meshes: Sequence[AnyMesh], told: list[tuple[Any, Any]]) -> Any:
    """An argument under Auto axes; what the type of a traced one tells is added to `told`."""
    if isinstance(leaf, UnevenArray):
        layout = leaf.layout and on_mesh(leaf.layout, auto(leaf.layout.mesh))
        static = (leaf.shape, leaf.sizes, layout)
        return UnevenArray.tree_unflatten(static, (_entered(leaf.array, meshes, []),))
    if isinstance(leaf, jax.Array):
        found = under_auto(leaf)
        if isinstance(leaf, Tracer) and found is not leaf:
            own = jax.typeof(leaf).sharding
            mesh = auto(_with_devices(own.mesh, meshes))
            told.append((found, NamedSharding(mesh, _in_one_form(own.spec))))
        return found
    if isinstance(leaf, NamedSharding):
        return on_mesh(leaf, auto(leaf.mesh))
    mesh = _given_mesh(leaf)
    return leaf if mesh is None else auto(mesh)


def _under(ambient: AnyMesh) -> contextlib.AbstractContextManager[Any]:
    """Compute as if the mesh that `jax.set_mesh` has set had Auto axes."""
    if not is_typed(ambient):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(auto(ambient))


def _left(x: Any, mesh: AnyMesh) -> Any:
    """A result on the caller's mesh; what lies on another grid stays there."""
    if isinstance(x, UnevenArray):
        layout = _on(x.layout or sharding_of(x), mesh)
        array = _left_so(x.array, layout) if layout is not None else x.array
        return UnevenArray.tree_unflatten((x.shape, x.sizes, layout or x.layout), (array,))
    if not isinstance(x, jax.Array):
        return x
    held = x.to_concrete_value() if isinstance(x, Tracer) else x
    told = sharding_of(x) if held is None else held.sharding
    layout = _on(NamedSharding(auto(mesh), P()) if told is None else told, mesh)
    return x if layout is None else _left_so(x, layout)


def _left_so(x: Any, layout: NamedSharding) -> Any:
    return constrain(x, layout) if isinstance(x, Tracer) else retyped(x, layout.mesh)


def _on(told: Any, mesh: AnyMesh) -> NamedSharding | None:
    """A layout with the types of a mesh; None if it is of another grid."""
    if not isinstance(told, NamedSharding) or not same_grid(told.mesh, mesh):
        return None
    mesh = _with_devices(mesh, [told.mesh])
    return NamedSharding(mesh, _in_one_form(told.spec, closed=AxisType.Auto not in mesh.axis_types))


def _in_one_form(spec: P, *, closed: bool = False) -> P:
    """A spec without trailing None; closed, with None where it is open."""
    entries = [None if closed and e is P.UNCONSTRAINED else e for e in entries_of(spec)]
    while entries and not entries[-1]:
        entries.pop()
    return P(*entries)
