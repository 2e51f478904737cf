"""The mesh axes over which a value varies between devices, inside `jax.shard_map`.

JAX tracks them there (`check_vma`), and raises for loops whose carries vary over more axes after an
iteration than before:

>>> import jax
>>> from jax.sharding import PartitionSpec as P
>>> mesh = jax.make_mesh((4,), ("x",))
>>> def count(block):
...     total, blocks = vary_equally((jax.numpy.zeros(()), block))
...     return jax.lax.scan(lambda total, row: (total + row.sum(), None), total, blocks)[0][None]
>>> run = jax.shard_map(count, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
>>> run(jax.numpy.ones((8, 2), device=jax.NamedSharding(mesh, P("x")))).tolist()
[4.0, 4.0, 4.0, 4.0]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from .jaxprs import equations


def varying(value: Any) -> frozenset[Any]:
    """The axes over which a value varies; none outside of `jax.shard_map`.

    Args:
        value: an array, or an abstract value.
    """
    kind = value if hasattr(value, "vma") or hasattr(value, "mat") else jax.typeof(value)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma


def checked_axes() -> frozenset[Any]:
    """The current Manual axes over which JAX tracks variation."""
    names = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if not names:
        return frozenset()
    [index] = jax.make_jaxpr(lambda: jax.lax.axis_index(names))().out_avals
    return varying(index)


def communicated(program: Any) -> frozenset[Any]:
    """The axes over which a traced program communicates, or reads its index."""
    axes = frozenset(checked_axes())
    named_axes: set[Any] = set()
    for equation in equations(program):
        for name in ("axes", "axis_name"):
            named = equation.params.get(name, ())
            named_axes.update(named if isinstance(named, tuple) else (named,))
    return axes & named_axes


def varying_over(value: Any, axes: Iterable[Any]) -> Any:
    """A value cast to vary over at least some axes."""
    missing = tuple(sorted(frozenset(axes) - varying(value)))
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def vary_equally(values: Any, axes: Iterable[Any] = ()) -> Any:
    """Values cast to vary over the same axes: those over which any of them varies."""
    leaves, structure = jax.tree.flatten(values)
    axes = frozenset(axes).union(*map(varying, leaves))
    return jax.tree.unflatten(structure, [varying_over(leaf, axes) for leaf in leaves])
