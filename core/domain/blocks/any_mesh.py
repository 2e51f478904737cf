"""Verbs on meshes of every axis type: computed under Auto axes, given back on the caller's mesh.

>>> import jax.numpy as jnp
>>> from isoshard.core.transfer.place import shard
>>> @any_mesh
... def double(x):
...     print("inside:", jax.typeof(x))
...     return lies(x + x, sharding_of(x))
>>> x = shard(jnp.ones((8, 4)), jax.make_mesh((2, 4), ("x", "y")), P("x", "y"))
>>> jax.typeof(double(x))
inside: float32[8,4]
ShapedArray(float32[8@x,4@y])

The caller's mesh is the one that is given, else that of the first array on Explicit axes; a verb
that another calls, or a function that is being lifted, stays under Auto axes. The layout in the
type of an array on such axes a verb finds by `known_shardings.sharding_of`, also where `jax.jit`
traces it; there a verb gives by `known_shardings.lies` the layouts of its results, which become
their types. An axis that it does not know, and a result of which it says nothing, is replicated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.axis_types import (
    AnyMesh,
    auto,
    constrain,
    is_typed,
    retyped,
    same_grid,
    under_auto,
)
from isoshard.core.layout.mesh import as_mesh, is_mesh
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.layout.uneven import UnevenArray, is_uneven, padded_of
from isoshard.core.runtime._jax_internals.tracers import Tracer

from .known_shardings import inside, sharding_of, telling
from .known_shardings import lies as lies

Given = ParamSpec("Given")
Made = TypeVar("Made")


def any_mesh(verb: Callable[Given, Made]) -> Callable[Given, Made]:
    """Let a verb take arrays, meshes and layouts with Explicit axes.

    Args:
        verb: of arrays, `UnevenArray`s, meshes and trees of them, under Auto axes.

    Returns:
        The verb. Arrays that come out are on the caller's mesh; their gradients have the types of
        what went in. No byte is copied on either way.
    """

    @functools.wraps(verb)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_uneven)
        ambient = jax.sharding.get_abstract_mesh()
        meshes = [mesh for leaf in leaves if (mesh := _mesh_of(leaf)) is not None]
        if not is_typed(ambient) and not any(map(is_typed, meshes)):
            return verb(*args, **kwargs)
        callers = None if inside() else _callers(leaves, meshes)
        border = _Border(callers, meshes, list(_traced_on(leaves)), [], [])
        given = [border.entered(x) for x in args]
        named = {name: border.entered(x) for name, x in kwargs.items()}
        untyped: Callable[..., Any] = verb
        with telling(border.told):
            with _under(ambient):
                made = untyped(*given, **named)
            return jax.tree.map(border.left, made, is_leaf=is_uneven)

    return called


@dataclasses.dataclass(frozen=True)
class _Border:
    """One call.

    Attributes:
        callers: the mesh that results are given back on; None where they stay under Auto axes.
        meshes: those of the arguments.
        traced: those of the types of arguments that `jax.jit` traces.
        told: pairs of a traced argument, inside, and its layout.
        same: pairs of an argument inside and outside.
    """

    callers: AnyMesh | None
    meshes: Sequence[AnyMesh]
    traced: Sequence[AnyMesh]
    told: list[tuple[Any, Any]]
    same: list[tuple[Any, Any]]

    def entered(self, argument: Any) -> Any:
        """An argument under Auto axes; as it is if nothing in it has a mesh."""
        leaves, structure = jax.tree.flatten(argument, is_leaf=is_uneven)
        inside = [self._entered(leaf) for leaf in leaves]
        if all(new is old for new, old in zip(inside, leaves, strict=True)):
            return argument
        return jax.tree.unflatten(structure, inside)

    def _entered(self, leaf: Any) -> Any:
        if isinstance(leaf, UnevenArray):
            static = (leaf.shape, leaf.sizes, leaf.layout and self._layout(leaf.layout))
            found = UnevenArray.tree_unflatten(static, (under_auto(leaf.array),))
            self.same.append((found.array, leaf.array))
            return found
        if isinstance(leaf, jax.Array):
            found = under_auto(leaf)
            self.same.append((found, leaf))
            if isinstance(leaf, Tracer) and found is not leaf:
                self.told.append((found, self._layout(_told_by(jax.typeof(leaf)))))
            return found
        if isinstance(leaf, NamedSharding):
            return self._layout(leaf)
        mesh = _given_mesh(leaf)
        return leaf if mesh is None else self._mesh(mesh)

    def _layout(self, layout: NamedSharding) -> NamedSharding:
        return NamedSharding(self._mesh(layout.mesh), _in_one_form(layout.spec))

    def _mesh(self, mesh: AnyMesh) -> AnyMesh:
        """A mesh to compute on: without devices where the types of what is traced have none.

        In one program JAX takes operators that split themselves only if all meshes with devices
        have the same types, and the arguments of the program are on the caller's.
        """
        known = next((own for own in self.traced if same_grid(own, mesh)), None)
        return auto(known or _with_devices(mesh, self.meshes))

    def left(self, x: Any) -> Any:
        """A result on the caller's mesh; what is on another grid stays there."""
        array = padded_of(x)
        if self.callers is None or not isinstance(array, jax.Array):
            return x
        layout = self._on_callers(self._told(x))
        if layout is None:
            return x
        array = self._typed(array, layout)
        if not isinstance(x, UnevenArray):
            return array
        known = array.sharding if not isinstance(array, Tracer) else layout
        layout = NamedSharding(known.mesh, _in_one_form(known.spec))
        return UnevenArray.tree_unflatten((x.shape, x.sizes, layout), (array,))

    def _told(self, x: Any) -> Any:
        """The layout of a result; replicated if nobody gives it."""
        array = padded_of(x)
        if not isinstance(array, Tracer):
            return array.sharding
        if not isinstance(x, UnevenArray) and (held := array.to_concrete_value()) is not None:
            return getattr(held, "sharding", None)
        told = sharding_of(x)
        callers: Any = self.callers
        return NamedSharding(self._mesh(callers), P()) if told is None else told

    def _on_callers(self, told: Any) -> NamedSharding | None:
        mesh: Any = self.callers
        if not isinstance(told, NamedSharding) or not same_grid(told.mesh, mesh):
            return None
        mesh = _with_devices(mesh, [told.mesh])
        is_closed = AxisType.Auto not in mesh.axis_types
        return NamedSharding(mesh, _in_one_form(told.spec, closed=is_closed))

    def _typed(self, array: Any, layout: NamedSharding) -> Any:
        for entered, outside in self.same:
            if entered is array and _mesh_of(outside) in (layout.mesh, layout.mesh.abstract_mesh):
                return outside
        if not isinstance(array, Tracer):
            return retyped(array, layout.mesh)
        if any(same_grid(own, layout.mesh) for own in self.traced):
            layout = NamedSharding(layout.mesh.abstract_mesh, layout.spec)
        return constrain(array, layout)


def _mesh_of(leaf: Any) -> AnyMesh | None:
    """The mesh that an argument is or is on, with devices where they are known."""
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


def _told_by(aval: Any) -> NamedSharding:
    """The layout in a type: open where an Auto axis may split too."""
    mesh, entries = aval.sharding.mesh, entries_of(aval.sharding.spec)
    if mesh.are_all_axes_explicit:
        return aval.sharding
    is_open = [P.UNCONSTRAINED if entry is None else entry for entry in entries]
    return NamedSharding(mesh, P(*is_open, *[P.UNCONSTRAINED] * (aval.ndim - len(entries))))


def _given_mesh(leaf: Any) -> AnyMesh | None:
    if isinstance(leaf, NamedSharding):
        return leaf.mesh
    return as_mesh(leaf, abstract=True) if is_mesh(leaf) else None


def _traced_on(leaves: Sequence[Any]) -> Iterator[AnyMesh]:
    for leaf in leaves:
        array = padded_of(leaf)
        if isinstance(array, Tracer) and array.to_concrete_value() is None:
            mesh = jax.typeof(array).sharding.mesh
            if is_typed(mesh):
                yield mesh


def _callers(leaves: Sequence[Any], meshes: Sequence[AnyMesh]) -> AnyMesh | None:
    """The mesh that is given, else the first with Explicit axes; None if it has none."""
    given = (mesh for leaf in leaves if (mesh := _given_mesh(leaf)) is not None)
    mesh = next(given, None) or next(filter(is_typed, meshes), None)
    return _with_devices(mesh, meshes) if mesh is not None and is_typed(mesh) else None


def _with_devices(mesh: AnyMesh, others: Sequence[AnyMesh]) -> AnyMesh:
    """A mesh with the devices that another of its grid has; an array's type tells none."""
    if isinstance(mesh, Mesh):
        return mesh
    for other in others:
        if isinstance(other, Mesh) and same_grid(mesh, other):
            return Mesh(other.devices, other.axis_names, axis_types=mesh.axis_types)
    return mesh


def _under(ambient: AnyMesh) -> contextlib.AbstractContextManager[Any]:
    """Compute as if the mesh that `jax.set_mesh` has set had Auto axes."""
    if not is_typed(ambient):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(auto(ambient))


def _in_one_form(spec: P, *, closed: bool = False) -> P:
    """A spec without trailing None and groups of one; closed, with None where it is open."""
    entries = [None if closed and e is P.UNCONSTRAINED else e for e in entries_of(spec)]
    entries = [e[0] if isinstance(e, tuple) and len(e) == 1 else e or None for e in entries]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)
