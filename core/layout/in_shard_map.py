"""Shardings inside `jax.shard_map`, where a value is one device's block.

`jax.shard_map` runs a function over mesh axes, which are Manual inside. Over those a sharding is
specified by `in_specs` and `out_specs`; over the other axes of the mesh, if it runs over some only,
it may be constrained as usual:

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> from jax.sharding import PartitionSpec as P
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> def rows(block):                                    # of (4, 8), over "x"
...     return shard(block * 2, mesh, P(None, "y"))
>>> run = jax.shard_map(rows, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
>>> jax.jit(run)(jax.numpy.ones((8, 8))).sharding.spec
P('x', 'y')
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from isoshard.core.errors import ShardingError
from isoshard.core.runtime._jax_internals.tracers import Tracer

from .axis_types import same_grid
from .mesh import describe_mesh
from .spec_entries import axis_names, entries_of


def manual_axes() -> tuple[str, ...]:
    """The mesh axes of the surrounding `jax.shard_map`; none outside of it.

    Example:
        >>> manual_axes()
        ()
    """
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def manual_sharding(x: Any, sharding: Any, name: str) -> NamedSharding:
    """The sharding that a value inside `jax.shard_map` may be constrained to.

    Raises:
        ShardingError: the spec names a Manual axis, or all axes are, or the value is no argument
            of the function.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = ", ".join(map(repr, mesh.manual_axes))
    where = f"{name}: inside jax.shard_map over {manual}"
    if not isinstance(x, Tracer):
        raise ShardingError(
            f"{where} a {type(x).__name__} from outside cannot be sharded: make it an argument of "
            "the function, with its own in_specs."
        )
    if not isinstance(sharding, NamedSharding) or not same_grid(sharding.mesh, mesh):
        raise ShardingError(
            f"{where} the mesh is {describe_mesh(mesh)}, and {sharding} is not on it. Shard it "
            "outside."
        )
    taken = [n for e in entries_of(sharding.spec) for n in axis_names(e) if n in mesh.manual_axes]
    rest = [repr(axis) for axis in mesh.axis_names if axis not in mesh.manual_axes]
    if taken or not rest:
        raise ShardingError(f"{where} a value is one device's block, and {_reason(taken, rest)}")
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _reason(taken: list[str], rest: list[str]) -> str:
    out = "use in_specs and out_specs, or shard the array outside"
    if taken:
        names = ", ".join(map(repr, taken))
        left = f"; {', '.join(rest)} may be used here" if rest else ""
        return f"cannot be split over {names} again: {out}{left}."
    return f"no axis is left to shard it over: {out}, or run over fewer axes (axis_names=..)."
