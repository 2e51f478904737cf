"""Inside `jax.shard_map`: a value is one device's block, and axes left over can be asked for.

`jax.shard_map` runs a function over mesh axes, which are Manual inside. Along those a layout is
said by `in_specs` and `out_specs`; along the others of the mesh, if it runs over some axes only, it
may be asked for as ever:

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.place import shard
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
    """The mesh axes that `jax.shard_map` runs over here; none outside of it.

    Example:
        >>> manual_axes()
        ()
    """
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def sharding_here(x: Any, sharding: Any, name: str) -> NamedSharding:
    """What may be asked of a value inside `jax.shard_map`.

    Args:
        x: the value.
        sharding: what is wanted.
        name: of the value, for messages.

    Returns:
        The same layout, on the mesh as it is here.

    Raises:
        ShardingError: the spec names a Manual axis, or all axes are, or the value is no argument
            of the function.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = ", ".join(map(repr, mesh.manual_axes))
    where = f"{name}: inside jax.shard_map over {manual}"
    if not isinstance(x, Tracer):
        raise ShardingError(
            f"{where} nothing can be laid out that comes from outside, and it is a "
            f"{type(x).__name__}: make it an argument of the function, with its own in_specs."
        )
    if not isinstance(sharding, NamedSharding) or not same_grid(sharding.mesh, mesh):
        raise ShardingError(
            f"{where} the mesh is {describe_mesh(mesh)}, and {sharding} is not on it. Lay it out "
            "outside."
        )
    taken = [n for e in entries_of(sharding.spec) for n in axis_names(e) if n in mesh.manual_axes]
    rest = [repr(axis) for axis in mesh.axis_names if axis not in mesh.manual_axes]
    if taken or not rest:
        raise ShardingError(f"{where} a value is one device's block, and {_fault(taken, rest)}")
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _fault(taken: list[str], rest: list[str]) -> str:
    out = "say it by in_specs and out_specs, or lay the array out outside"
    if taken:
        names = ", ".join(map(repr, taken))
        left = f"; {', '.join(rest)} may be asked for here" if rest else ""
        return f"cannot be split along {names} again: {out}{left}."
    return f"no axis is left to lay it out over: {out}, or run over fewer axes (axis_names=..)."
