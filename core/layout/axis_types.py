"""Axis types: what the compiler may choose along each mesh axis, and the same data under another.

Along an Auto axis the compiler completes layouts. Along an Explicit one the layout is part of an
array's type (`jax.typeof`), and JAX refuses an operation that leaves it open. A Manual axis is one
that `jax.shard_map` runs over. Meshes of the same devices in the same order under the same names
are one grid, whatever their types: between them no byte moves.

>>> from isoshard.core.layout.mesh import make_mesh
>>> ours = make_mesh((2, 4), ("x", "y"))
>>> theirs = jax.make_mesh((2, 4), ("x", "y"))                  # Explicit, JAX's default
>>> ours == theirs, same_grid(ours, theirs), auto(theirs) == ours
(False, True, True)
>>> x = jax.device_put(jax.numpy.ones((8, 4)), NamedSharding(theirs, P("x", "y")))
>>> jax.typeof(x)
ShapedArray(float32[8@x,4@y])
>>> same = under_auto(x)
>>> jax.typeof(same), same.sharding.spec
(ShapedArray(float32[8,4]), P('x', 'y'))
>>> jax.typeof(retyped(same, theirs))
ShapedArray(float32[8@x,4@y])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.frameworks import framework_of
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.caches import cached

from .offload import bring_in, on_device, put_back
from .partial_sums import reduced, refuse, resharded, same_terms, stored, unreduced
from .spec_entries import axis_names, entries_of

AnyMesh = Mesh | AbstractMesh

_NO_SUMS = "along Auto axes the compiler takes sums where it likes"


@cached(1024)
def auto(mesh: Any) -> Any:
    """The same grid with Auto axes for Explicit ones; Manual axes stay.

    Args:
        mesh: with devices, or abstract.

    Example:
        >>> auto(jax.make_mesh((8,), ("x",))).axis_types
        (Auto,)
    """
    if not is_typed(mesh):
        return mesh
    kinds = [AxisType.Auto if k == AxisType.Explicit else k for k in mesh.axis_types]
    if isinstance(mesh, AbstractMesh):
        return mesh.update(axis_types=tuple(kinds))
    return Mesh(mesh.devices, mesh.axis_names, axis_types=tuple(kinds))


def is_typed(mesh: AnyMesh) -> bool:
    """Whether layouts along some axis are part of an array's type: one is Explicit."""
    return AxisType.Explicit in mesh.axis_types


def same_grid(one: AnyMesh, other: AnyMesh) -> bool:
    """Whether two meshes are the same but for their types: devices, their order, sizes, names.

    Of an abstract mesh only sizes and names are known.
    """
    return one is other or (
        tuple(one.shape.items()) == tuple(other.shape.items()) and same_devices(one, other)
    )


def same_devices(one: AnyMesh, other: AnyMesh) -> bool:
    """Whether two meshes number the same devices alike; of an abstract one only how many."""
    if isinstance(one, AbstractMesh) or isinstance(other, AbstractMesh):
        return one.size == other.size
    return list(one.devices.flat) == list(other.devices.flat)


def under_auto(x: Any) -> Any:
    """An array on the same grid with Auto axes; it shares every buffer.

    Args:
        x: a `jax.Array`, also traced. What is on no mesh with Explicit axes is returned as it is.
            A reduced axis becomes one along which it is copied.

    Raises:
        UnrepresentableError: its sums are still to be taken.
    """
    if isinstance(x, Tracer):
        told = jax.typeof(x).sharding
        if not is_typed(told.mesh):
            return x
        refuse(told, _NO_SUMS)
        x = jax.sharding.reshard(x, stored(told)) if reduced(told) else x
        mesh = auto(told.mesh)
        # As `jax.sharding.auto_axes` does: inside `jax.vmap` JAX would otherwise add the axis that
        # the mapped dimension is sharded along, which JAX 0.12 refuses on Auto axes.
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.sharding.reshard(x, NamedSharding(mesh, P()))
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding) or not is_typed(sharding.mesh):
        return x
    return jax.device_put(x, on_mesh(sharding, auto(sharding.mesh)))


def retyped(x: jax.Array, mesh: Any) -> jax.Array:
    """The same array on another mesh of the same grid; it shares every buffer.

    Args:
        x: not traced, on a mesh.
        mesh: of the grid that `x` is on, with any types.
    """
    own: Any = x.sharding
    return x if own.mesh == mesh else jax.device_put(x, on_mesh(own, mesh))


def typeof(x: Any) -> Any:
    """The type of an array as `jax.typeof` tells it: shape, dtype, and layout on Explicit axes.

    Args:
        x: an array of JAX, also traced, or of a framework with a bridge. What is recorded is
            computed where only the compiler knows its layout.

    Returns:
        The abstract value.

    Raises:
        ShardingError: an array of a framework is on no mesh.
        TypeError: `x` is no array.

    Example:
        >>> layout = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
        >>> typeof(jax.device_put(jax.numpy.ones((8, 4)), layout))
        ShapedArray(float32[8@x,4])
    """
    framework = framework_of(x)
    return jax.typeof(x) if framework is None else framework.typeof(x)


def on_mesh(sharding: Any, mesh: AnyMesh) -> NamedSharding:
    """The same blocks on the same devices, said on another mesh of the same grid.

    Raises:
        UnrepresentableError: sums are still to be taken, along an axis that is not Explicit there.
    """
    if unreduced(sharding) or reduced(sharding):
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if any(kinds[n] != AxisType.Explicit for n in (*unreduced(sharding), *reduced(sharding))):
            refuse(sharding, _NO_SUMS)
            sharding = stored(sharding)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def beside(x: Any, sharding: NamedSharding) -> NamedSharding:
    """A layout for a traced value: one on Auto axes of that grid stays on them.

    Otherwise it could not meet the values that it was computed with. Sums that are to be left
    open are of Explicit axes only, so such a layout is taken as it is.
    """
    there = jax.typeof(x).sharding.mesh
    if (
        unreduced(sharding)
        or reduced(sharding)
        or is_typed(there)
        or not is_typed(sharding.mesh)
        or not same_grid(there, sharding.mesh)
    ):
        return sharding
    return on_mesh(sharding, there)


def constrain(x: Any, sharding: Any) -> Any:
    """Ask for a layout inside a JAX transformation, whatever the types of the mesh.

    Along Explicit axes it becomes part of the value's type, along Auto ones it is a constraint of
    the compiler, which is asked for equal shards only; see `dividing`.

    Args:
        x: traced, on any mesh of the same devices or on none.
        sharding: over a mesh with devices, or an abstract one; or of another kind. Where its spec
            is `P.UNCONSTRAINED`, a value on Explicit axes stays as it is, and the compiler chooses
            along Auto ones.

    Returns:
        The value; on the mesh of `sharding`, or on its own where the spec leaves an axis open; in
        the memory that `sharding` says.
    """
    if not isinstance(sharding, NamedSharding):
        return jax.lax.with_sharding_constraint(x, sharding)
    return put_back(_constrained(bring_in(x), on_device(sharding)), sharding)


def _constrained(x: Any, sharding: NamedSharding) -> Any:
    x = _without_sums(x, sharding)
    if unreduced(sharding) or reduced(sharding):
        # two steps: JAX takes an Auto value for a term if it changes both at once
        x = x if unreduced(jax.typeof(x).sharding) else constrain(x, stored(sharding))
        return resharded(x, sharding)
    mesh, spec = sharding.mesh, sharding.spec
    own = jax.typeof(x).sharding.mesh
    if (is_typed(own) or is_typed(mesh)) and same_grid(own, mesh):
        # Its devices are known. Said again, beside other types, JAX refuses operators that split
        # themselves: all meshes with devices in a program are to have the same types.
        mesh = mesh.abstract_mesh
    if P.UNCONSTRAINED in entries_of(spec):
        told = jax.typeof(x).sharding
        if is_typed(told.mesh):
            mesh, spec = told.mesh, _completed(spec, told)
    if not is_typed(mesh) or AxisType.Manual not in mesh.axis_types:
        x = _asked(under_auto(x), NamedSharding(auto(mesh), spec))
    if not is_typed(mesh):
        return x
    x = jax.sharding.reshard(x, NamedSharding(mesh, along(spec, mesh, AxisType.Explicit)))
    rest = along(spec, mesh, AxisType.Auto) if AxisType.Manual in mesh.axis_types else P()
    return x if rest == P() else _asked(x, NamedSharding(mesh, rest))


def _without_sums(x: Any, sharding: NamedSharding) -> Any:
    """Reduce the terms that a layout does not leave unreduced, into its shards."""
    told = jax.typeof(x).sharding
    if not unreduced(told) or same_terms(told, sharding):
        return x
    said = sharding if same_grid(told.mesh, sharding.mesh) else told
    said = told if P.UNCONSTRAINED in entries_of(said.spec) else said
    return resharded(x, on_mesh(stored(said), told.mesh))


def _completed(spec: P, told: NamedSharding) -> P:
    """A spec that says of its open axes what a value's type says of them."""
    entries, given = [*entries_of(spec)], [*entries_of(told.spec)]
    used = {name for entry in entries for name in axis_names(entry)}
    for axis, entry in enumerate(entries):
        if entry is P.UNCONSTRAINED:
            have = axis_names(given[axis]) if axis < len(given) else ()
            kept = tuple(name for name in have if name not in used)
            entries[axis] = kept or (None if told.mesh.are_all_axes_explicit else entry)
    return P(*entries)


def _asked(x: Any, sharding: NamedSharding) -> Any:
    """A constraint of the compiler; under the caller's Explicit mesh JAX takes it for a check."""
    sharding = dividing(sharding, x.shape)
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        return jax.lax.with_sharding_constraint(x, sharding)


def dividing(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """A layout whose axes that do not divide stay whole.

    XLA's partitioner pads a shard that is too short. Where it then exchanges padded shards between
    meshes' axes it may put blocks in each other's places, and says nothing (seen with jaxlib 0.10:
    one row over two devices, its columns over four). So no such layout is asked of it.

    Args:
        sharding: with an entry for each axis that is split.
        shape: of the array.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> mesh = make_mesh((2, 4), ("x", "y"))
        >>> dividing(NamedSharding(mesh, P("x", "y")), (1, 8)).spec
        P(None, 'y')
    """
    sizes = dict(sharding.mesh.shape)
    entries = entries_of(sharding.spec)
    counts = [math.prod(sizes[name] for name in axis_names(entry)) for entry in entries]
    if not any(extent % n for extent, n in zip(shape, counts, strict=False)):
        return sharding
    kept = [
        None if extent % n else entry
        for entry, extent, n in zip(entries, shape, counts, strict=False)
    ]
    return NamedSharding(sharding.mesh, P(*kept), memory_kind=sharding.memory_kind)


def along(spec: P, mesh: AnyMesh, kind: AxisType) -> P:
    """What a spec says of the axes of one type.

    Example:
        >>> kinds = (AxisType.Explicit, AxisType.Auto)
        >>> along(P(("x", "y"), None), jax.make_mesh((2, 4), ("x", "y"), kinds), AxisType.Auto)
        P('y',)
    """
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    entries: list[Any] = []
    for entry in entries_of(spec):
        names = tuple(name for name in axis_names(entry) if kinds[name] == kind)
        is_open = entry is P.UNCONSTRAINED and kind == AxisType.Auto
        entries.append(entry if is_open else names or None)
    while entries and not entries[-1]:
        entries.pop()
    return P(*entries)
