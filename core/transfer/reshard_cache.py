"""A cache of target shardings by the array's sharding and shape, the mesh and the spec.

The checks of `shard` take longer than moving a small array. Their result depends on these four
alone, so for a spec of axis names they run once.

>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((8,), ("x",))
>>> x = jax.numpy.ones((8, 6))
>>> cached_sharding(x, mesh, P("x")) is None
True
>>> to = resharding(x, mesh, P("x"), NamedSharding(mesh, P("x")))
>>> cached_sharding(x, mesh, P("x")) is to
True
>>> rows = jax.device_put(x, NamedSharding(mesh, P("x", None)))       # the very sharding: unchanged
>>> resharding(rows, mesh, P("x", None), to) is rows.sharding
True
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.in_shard_map import manual_axes
from isoshard.core.layout.partial_sums import unreduced
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.caches import Bounded

_cache: Bounded[Any, Sharding] = Bounded(8192, "shard: shardings by argument")


def cached_sharding(x: Any, mesh: Any, spec: Any) -> Sharding | None:
    """The cached target for `jax.device_put`, or None.

    It is `x.sharding` itself, by identity, if the array need not move.
    """
    if type(spec) is not P or not isinstance(mesh, Mesh):
        return None
    if not isinstance(x, jax.Array) or isinstance(x, Tracer):
        return None
    current = x.sharding
    target = _cache.get((current, mesh, spec, x.shape))
    if target is None or manual_axes():
        return None
    return current if target == current else target


def resharding(x: jax.Array, mesh: Mesh, spec: Any, sharding: NamedSharding) -> Sharding:
    """The target sharding of a checked array, cached if the spec consists of axis names.

    Args:
        x: the array, not traced.
        mesh: the mesh.
        spec: as the caller spelled it.
        sharding: the canonical sharding of both.

    Returns:
        The sharding of `x` if that has this very spec, even if not canonical; else `sharding`.
    """
    if type(spec) is not P or not all(map(_is_named, entries_of(spec))):
        return sharding
    exact = NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
    target = x.sharding if x.sharding == exact else sharding
    if unreduced(x.sharding) or unreduced(sharding):
        return target  # not cached: `jax.device_put` cannot change unreduced axes (JAX 0.9 raises)
    if x.is_fully_addressable and sharding.is_fully_addressable:
        _cache[x.sharding, mesh, spec, x.shape] = target
    return target


def _is_named(entry: Any) -> bool:
    axes = entry if type(entry) is tuple else (entry,)
    return entry is None or all(type(axis) is str for axis in axes)
