"""Verbs on meshes of every axis type: computed under Auto axes, returned on the caller's mesh.

>>> import jax.numpy as jnp
>>> from isoshard.core.transfer.device_put import shard
>>> @any_mesh
... def double(x):
...     print("inside:", jax.typeof(x))
...     return record_sharding(x + x, sharding_of(x))
>>> x = shard(jnp.ones((8, 4)), jax.make_mesh((2, 4), ("x", "y")), P("x", "y"))
>>> jax.typeof(double(x))
inside: float32[8,4]
ShapedArray(float32[8@x,4@y])

The caller's mesh is the one passed, else that of the first array on Explicit axes; a verb that
another calls, or a function that is being lifted, runs under Auto axes. A verb reads the sharding
in the type of an array on such axes with `traced_shardings.sharding_of`, also where `jax.jit`
traces it, and records those of its results with `traced_shardings.record_sharding`; they become
their types. An axis without a sharding, and a result that is not recorded, is replicated.
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

from .traced_shardings import inside, recorded_shardings, sharding_of
from .traced_shardings import record_sharding as record_sharding

Params = ParamSpec("Params")
Result = TypeVar("Result")


def any_mesh(verb: Callable[Params, Result]) -> Callable[Params, Result]:
    """Let a verb take arrays, meshes and shardings with Explicit axes."""

    @functools.wraps(verb)
    def called(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_uneven)
        ambient = jax.sharding.get_abstract_mesh()
        meshes = [mesh for leaf in leaves if (mesh := _mesh_of(leaf)) is not None]
        if not is_typed(ambient) and not any(map(is_typed, meshes)):
            return verb(*args, **kwargs)
        callers = None if inside() else _callers(leaves, meshes)
        boundary = _Boundary(callers, meshes, list(_traced_on(leaves)), [], [])
        inner_args = [boundary.entered(x) for x in args]
        inner_kwargs = {name: boundary.entered(x) for name, x in kwargs.items()}
        untyped: Callable[..., Any] = verb
        with recorded_shardings(boundary.shardings):
            with _under(ambient):
                results = untyped(*inner_args, **inner_kwargs)
            return jax.tree.map(boundary.left, results, is_leaf=is_uneven)

    return called


@dataclasses.dataclass(frozen=True)
class _Boundary:
    """The conversion of one call's arguments and results.

    Attributes:
        callers: the mesh that results are returned on; None where they remain under Auto axes.
        meshes: those of the arguments.
        traced: those of the types of arguments that `jax.jit` traces.
        shardings: pairs of a traced argument, inside, and its sharding.
        same: pairs of an argument inside and outside.
    """

    callers: AnyMesh | None
    meshes: Sequence[AnyMesh]
    traced: Sequence[AnyMesh]
    shardings: list[tuple[Any, Any]]
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
            entered = UnevenArray.tree_unflatten(static, (under_auto(leaf.array),))
            self.same.append((entered.array, leaf.array))
            return entered
        if isinstance(leaf, jax.Array):
            entered = under_auto(leaf)
            self.same.append((entered, leaf))
            if isinstance(leaf, Tracer) and entered is not leaf:
                self.shardings.append((entered, self._layout(_sharding_in_type(jax.typeof(leaf)))))
            return entered
        if isinstance(leaf, NamedSharding):
            return self._layout(leaf)
        mesh = _mesh_argument(leaf)
        return leaf if mesh is None else self._mesh(mesh)

    def _layout(self, layout: NamedSharding) -> NamedSharding:
        return NamedSharding(self._mesh(layout.mesh), _canonical(layout.spec))

    def _mesh(self, mesh: AnyMesh) -> AnyMesh:
        """A mesh to compute on: without devices where the types of what is traced have none.

        In one program JAX takes operators that split themselves only if all meshes with devices
        have the same types, and the arguments of the program are on the caller's.
        """
        traced_mesh = next(
            (mesh_of_type for mesh_of_type in self.traced if same_grid(mesh_of_type, mesh)), None
        )
        return auto(traced_mesh or _with_devices(mesh, self.meshes))

    def left(self, x: Any) -> Any:
        """A result on the caller's mesh; one on another grid is unchanged."""
        array = padded_of(x)
        if self.callers is None or not isinstance(array, jax.Array):
            return x
        layout = self._on_callers(self._sharding_of(x))
        if layout is None:
            return x
        array = self._typed(array, layout)
        if not isinstance(x, UnevenArray):
            return array
        sharding = array.sharding if not isinstance(array, Tracer) else layout
        layout = NamedSharding(sharding.mesh, _canonical(sharding.spec))
        return UnevenArray.tree_unflatten((x.shape, x.sizes, layout), (array,))

    def _sharding_of(self, x: Any) -> Any:
        """The sharding of a result; replicated if it was not recorded."""
        array = padded_of(x)
        if not isinstance(array, Tracer):
            return array.sharding
        if not isinstance(x, UnevenArray) and (value := array.to_concrete_value()) is not None:
            return getattr(value, "sharding", None)
        sharding = sharding_of(x)
        callers: Any = self.callers
        return NamedSharding(self._mesh(callers), P()) if sharding is None else sharding

    def _on_callers(self, sharding: Any) -> NamedSharding | None:
        mesh: Any = self.callers
        if not isinstance(sharding, NamedSharding) or not same_grid(sharding.mesh, mesh):
            return None
        mesh = _with_devices(mesh, [sharding.mesh])
        is_closed = AxisType.Auto not in mesh.axis_types
        return NamedSharding(mesh, _canonical(sharding.spec, closed=is_closed))

    def _typed(self, array: Any, layout: NamedSharding) -> Any:
        for entered, outside in self.same:
            if entered is array and _mesh_of(outside) in (layout.mesh, layout.mesh.abstract_mesh):
                return outside
        if not isinstance(array, Tracer):
            return retyped(array, layout.mesh)
        if any(same_grid(mesh, layout.mesh) for mesh in self.traced):
            layout = NamedSharding(layout.mesh.abstract_mesh, layout.spec)
        return constrain(array, layout)


def _mesh_of(leaf: Any) -> AnyMesh | None:
    """The mesh that an argument is or is on, with devices where it has them."""
    if isinstance(leaf, UnevenArray) and isinstance(leaf.layout, NamedSharding):
        return leaf.layout.mesh
    array = padded_of(leaf)
    if isinstance(array, Tracer):
        value = array.to_concrete_value()
        mesh = jax.typeof(array).sharding.mesh
        return (None if mesh.empty else mesh) if value is None else _mesh_of(value)
    if isinstance(array, jax.Array):
        return array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    return _mesh_argument(leaf)


def _sharding_in_type(aval: Any) -> NamedSharding:
    """The sharding in a type: open where an Auto axis may split too."""
    mesh, entries = aval.sharding.mesh, entries_of(aval.sharding.spec)
    if mesh.are_all_axes_explicit:
        return aval.sharding
    is_open = [P.UNCONSTRAINED if entry is None else entry for entry in entries]
    return NamedSharding(mesh, P(*is_open, *[P.UNCONSTRAINED] * (aval.ndim - len(entries))))


def _mesh_argument(leaf: Any) -> AnyMesh | None:
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
    """The mesh passed, else the first with Explicit axes; None if it has none."""
    arguments = (mesh for leaf in leaves if (mesh := _mesh_argument(leaf)) is not None)
    mesh = next(arguments, None) or next(filter(is_typed, meshes), None)
    return _with_devices(mesh, meshes) if mesh is not None and is_typed(mesh) else None


def _with_devices(mesh: AnyMesh, others: Sequence[AnyMesh]) -> AnyMesh:
    """A mesh with the devices that another of its grid has; an array's type has none."""
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


def _canonical(spec: P, *, closed: bool = False) -> P:
    """A spec without trailing None and groups of one; closed, with None where it is open."""
    entries = [None if closed and e is P.UNCONSTRAINED else e for e in entries_of(spec)]
    entries = [e[0] if isinstance(e, tuple) and len(e) == 1 else e or None for e in entries]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)
