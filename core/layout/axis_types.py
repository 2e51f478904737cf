"""Axis types of meshes, and conversion of arrays between meshes that differ by types only.

Over an Auto axis the compiler propagates shardings. Over an Explicit one the sharding is part of an
array's type (`jax.typeof`), and JAX raises for an operation that leaves it ambiguous. A Manual axis
is one that `jax.shard_map` runs over. Meshes of the same devices in the same order under the same
names are one grid, whatever their types: between them no byte moves.

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

from .offload import on_device, to_device, to_memory_of
from .partial_sums import check_no_sums, reduced, resharded, same_terms, stored, unreduced
from .spec_entries import axis_names, entries_of

AnyMesh = Mesh | AbstractMesh

_NO_SUMS = "over Auto axes the compiler reduces sums where it chooses"


@cached(1024)
def auto(mesh: Any) -> Any:
    """The same grid with Auto axes for Explicit ones; Manual axes are kept.

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
    """Whether any axis is Explicit, so that shardings are part of an array's type."""
    return AxisType.Explicit in mesh.axis_types


def same_grid(first: AnyMesh, other: AnyMesh) -> bool:
    """Whether two meshes are the same but for their types: devices, their order, sizes, names.

    Of an abstract mesh only sizes and names are known.
    """
    return first is other or (
        tuple(first.shape.items()) == tuple(other.shape.items()) and same_devices(first, other)
    )


def same_devices(first: AnyMesh, other: AnyMesh) -> bool:
    """Whether two meshes have the same devices in the same order; of an abstract one, as many."""
    if isinstance(first, AbstractMesh) or isinstance(other, AbstractMesh):
        return first.size == other.size
    return list(first.devices.flat) == list(other.devices.flat)


def under_auto(x: Any) -> Any:
    """An array on the same grid with Auto axes; it shares every buffer.

    Args:
        x: a `jax.Array`, also traced. One without Explicit axes is returned as it is. A reduced
            axis becomes one over which it is replicated.

    Raises:
        UnrepresentableError: it has unreduced axes.
    """
    if isinstance(x, Tracer):
        value_sharding = jax.typeof(x).sharding
        if not is_typed(value_sharding.mesh):
            return x
        check_no_sums(value_sharding, _NO_SUMS)
        x = jax.sharding.reshard(x, stored(value_sharding)) if reduced(value_sharding) else x
        mesh = auto(value_sharding.mesh)
        # As `jax.sharding.auto_axes` does: inside `jax.vmap` JAX would otherwise add the axis that
        # the mapped dimension is sharded along, for which JAX 0.12 raises on Auto axes.
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
    current: Any = x.sharding
    return x if current.mesh == mesh else jax.device_put(x, on_mesh(current, mesh))


def typeof(x: Any) -> Any:
    """The type of an array as `jax.typeof`: shape, dtype, and sharding over Explicit axes.

    Args:
        x: an array of JAX, also traced, or of a framework with a bridge. Recorded values are
            computed if only the compiler can determine their sharding.

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
    """The same sharding, over another mesh of the same grid.

    Raises:
        UnrepresentableError: an unreduced axis is not Explicit there.
    """
    if unreduced(sharding) or reduced(sharding):
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if any(kinds[n] != AxisType.Explicit for n in (*unreduced(sharding), *reduced(sharding))):
            check_no_sums(sharding, _NO_SUMS)
            sharding = stored(sharding)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def on_value_mesh(x: Any, sharding: NamedSharding) -> NamedSharding:
    """A target sharding for a traced value: over the value's own mesh if that is Auto.

    JAX does not combine values on meshes of different types, so a value on Auto axes must remain
    on them. Unreduced axes are Explicit only, so such a sharding is returned as it is.
    """
    value_mesh = jax.typeof(x).sharding.mesh
    if (
        unreduced(sharding)
        or reduced(sharding)
        or is_typed(value_mesh)
        or not is_typed(sharding.mesh)
        or not same_grid(value_mesh, sharding.mesh)
    ):
        return sharding
    return on_mesh(sharding, value_mesh)


def constrain(x: Any, sharding: Any) -> Any:
    """Constrain the sharding of a traced value, whatever the types of the mesh.

    Over Explicit axes it becomes part of the value's type, over Auto ones it is a constraint of the
    compiler, for even shards only; see `dividing`.

    Args:
        x: traced, on any mesh of the same devices or on none.
        sharding: over a mesh with devices, or an abstract one; or of another kind. Where its spec
            is `P.UNCONSTRAINED`, a value on Explicit axes is unchanged, and the compiler chooses
            over Auto ones.

    Returns:
        The value; on the mesh of `sharding`, or on its own where the spec leaves an axis open; in
        the memory kind of `sharding`.
    """
    if not isinstance(sharding, NamedSharding):
        return jax.lax.with_sharding_constraint(x, sharding)
    return to_memory_of(_constrained(to_device(x), on_device(sharding)), sharding)


def _constrained(x: Any, sharding: NamedSharding) -> Any:
    x = _without_sums(x, sharding)
    if unreduced(sharding) or reduced(sharding):
        # In two steps: changing both at once, JAX takes the Auto value itself for a term.
        x = x if unreduced(jax.typeof(x).sharding) else constrain(x, stored(sharding))
        return resharded(x, sharding)
    mesh, spec = sharding.mesh, sharding.spec
    value_mesh = jax.typeof(x).sharding.mesh
    if (is_typed(value_mesh) or is_typed(mesh)) and same_grid(value_mesh, mesh):
        # Its devices are known. With concrete meshes of two types in one program JAX raises for
        # custom_partitioning operators: all its concrete meshes must have the same types.
        mesh = mesh.abstract_mesh
    if P.UNCONSTRAINED in entries_of(spec):
        current = jax.typeof(x).sharding
        if is_typed(current.mesh):
            mesh, spec = current.mesh, _completed(spec, current)
    if not is_typed(mesh) or AxisType.Manual not in mesh.axis_types:
        x = _constraint(under_auto(x), NamedSharding(auto(mesh), spec))
    if not is_typed(mesh):
        return x
    x = jax.sharding.reshard(x, NamedSharding(mesh, spec_over(spec, mesh, AxisType.Explicit)))
    rest = spec_over(spec, mesh, AxisType.Auto) if AxisType.Manual in mesh.axis_types else P()
    return x if rest == P() else _constraint(x, NamedSharding(mesh, rest))


def _without_sums(x: Any, sharding: NamedSharding) -> Any:
    """Reduce the axes that a sharding does not leave unreduced, into its shards."""
    current = jax.typeof(x).sharding
    if not unreduced(current) or same_terms(current, sharding):
        return x
    target = sharding if same_grid(current.mesh, sharding.mesh) else current
    target = current if P.UNCONSTRAINED in entries_of(target.spec) else target
    return resharded(x, on_mesh(stored(target), current.mesh))


def _completed(spec: P, current: NamedSharding) -> P:
    """A spec whose unconstrained axes are filled in from a value's type."""
    entries, value_entries = [*entries_of(spec)], [*entries_of(current.spec)]
    used = {name for entry in entries for name in axis_names(entry)}
    for axis, entry in enumerate(entries):
        if entry is P.UNCONSTRAINED:
            have = axis_names(value_entries[axis]) if axis < len(value_entries) else ()
            unused = tuple(name for name in have if name not in used)
            entries[axis] = unused or (None if current.mesh.are_all_axes_explicit else entry)
    return P(*entries)


def _constraint(x: Any, sharding: NamedSharding) -> Any:
    """A sharding constraint; under the caller's Explicit mesh JAX would only check it."""
    sharding = dividing(sharding, x.shape)
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        return jax.lax.with_sharding_constraint(x, sharding)


def dividing(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """A sharding in which axes that do not divide are not split.

    XLA's partitioner pads a shard that is too short. Where it then exchanges padded shards between
    mesh axes it may silently swap blocks (seen with jaxlib 0.10: one row over two devices, its
    columns over four). So it never gets such a constraint.

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
    divisible = [
        None if extent % n else entry
        for entry, extent, n in zip(entries, shape, counts, strict=False)
    ]
    return NamedSharding(sharding.mesh, P(*divisible), memory_kind=sharding.memory_kind)


def spec_over(spec: P, mesh: AnyMesh, kind: AxisType) -> P:
    """The entries of a spec restricted to mesh axes of one type.

    Example:
        >>> kinds = (AxisType.Explicit, AxisType.Auto)
        >>> spec_over(P(("x", "y"), None), jax.make_mesh((2, 4), ("x", "y"), kinds), AxisType.Auto)
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
