"""Moves: what was decided for one layout of an array and another asked for, to be done again.

What `shard` checks of a small array takes longer than moving it. All of it follows from the array's
layout and shape, the mesh and the spec, so for a spec of names it is decided once.

>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((8,), ("x",))
>>> x = jax.numpy.ones((8, 6))
>>> known_move(x, mesh, P("x")) is None
True
>>> to = move_of(x, mesh, P("x"), NamedSharding(mesh, P("x")))
>>> known_move(x, mesh, P("x")) is to
True
>>> rows = jax.device_put(x, NamedSharding(mesh, P("x", None)))       # laid out as asked, stays
>>> move_of(rows, mesh, P("x", None), to) is rows.sharding
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

_known: Bounded[Any, Sharding] = Bounded(8192, "shard: shardings by argument")


def known_move(x: Any, mesh: Any, spec: Any) -> Sharding | None:
    """The layout that `jax.device_put` is to give an array, if that was noted.

    Args:
        x: anything.
        mesh: what `shard` was given.
        spec: likewise.

    Returns:
        The sharding, which is that of `x` where it is as asked; or None, and all has to be
        looked at.
    """
    if type(spec) is not P or not isinstance(mesh, Mesh):
        return None
    if not isinstance(x, jax.Array) or isinstance(x, Tracer):
        return None
    have = x.sharding
    found = _known.get((have, mesh, spec, x.shape))
    if found is None or manual_axes():
        return None
    return have if found == have else found


def move_of(x: jax.Array, mesh: Mesh, spec: Any, sharding: NamedSharding) -> Sharding:
    """Decide the new layout of an array, after all was looked at, and note it.

    Args:
        x: the array, not traced.
        mesh: the mesh.
        spec: as it was given; noted if it is one of names, of which equal ones are alike.
        sharding: the one form of both.

    Returns:
        The sharding of `x` if that is by the very spec, though it may not be in the one form;
        otherwise `sharding`.
    """
    if type(spec) is not P or not all(map(_is_named, entries_of(spec))):
        return sharding
    as_given = NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
    found = x.sharding if x.sharding == as_given else sharding
    if unreduced(x.sharding) or unreduced(sharding):
        return found  # `jax.device_put` neither takes nor makes sums (JAX 0.9 raises)
    if x.is_fully_addressable and sharding.is_fully_addressable:
        _known[x.sharding, mesh, spec, x.shape] = found
    return found


def _is_named(entry: Any) -> bool:
    axes = entry if type(entry) is tuple else (entry,)
    return entry is None or all(type(axis) is str for axis in axes)
