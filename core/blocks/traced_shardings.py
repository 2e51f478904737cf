"""The sharding of an array, also while it is traced, and the sizes of its blocks.

An array has a sharding, and an `UnevenArray` even while it is traced. A tracer of `jax.jit` has
none, so it is recorded (`recorded_shardings`); a tracer of `jax.grad` outside `jax.jit` has a
concrete array.

>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> points = shard(jnp.zeros((8, 3)), make_mesh((4,), ("x",)), ("x",))
>>> sharding_of(points).spec
P('x',)
>>> errors = []
>>> block_sizes("axis 0", 8, 4, None, errors), block_sizes("axis 1", 8, 3, None, errors)
((2, 2, 2, 2), (2, 2, 2))
>>> errors
['axis 1 has size 8, which 3 shards do not divide: pad it, iso.shard(x, mesh, spec, uneven="pad")']
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.layout.uneven import UnevenArray, padded_of
from isoshard.core.runtime._jax_internals.tracers import Tracer


def sharding_of(value: Any) -> Any:
    """The sharding of an array.

    Args:
        value: a jax.Array or UnevenArray, traced or not; or of NumPy.

    Returns:
        The sharding; None for a value that `jax.jit` traces and that has none, and of NumPy's.
    """
    array = padded_of(value)
    if not isinstance(array, Tracer):
        return getattr(array, "sharding", None)
    if isinstance(value, UnevenArray) and value.layout is not None:
        return value.layout
    for recorded, sharding in _RECORDED.get() or ():
        if recorded is array:
            return sharding
    return getattr(array.to_concrete_value(), "sharding", None)


def closed_sharding_of(value: Any) -> Any:
    """Like `sharding_of`, but None if the sharding is open along an axis."""
    sharding = sharding_of(value)
    is_open = isinstance(sharding, NamedSharding) and P.UNCONSTRAINED in entries_of(sharding.spec)
    return None if is_open else sharding


_RECORDED: contextvars.ContextVar[tuple[tuple[Any, Any], ...] | None] = contextvars.ContextVar(
    "recorded shardings", default=None
)


@contextlib.contextmanager
def recorded_shardings(layouts: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Record the shardings of traced values, for `sharding_of` inside."""
    token = _RECORDED.set((*(_RECORDED.get() or ()), *layouts))
    try:
        yield
    finally:
        _RECORDED.reset(token)


def inside() -> bool:
    """Whether `recorded_shardings` is active."""
    return _RECORDED.get() is not None


def record_sharding(array: Any, sharding: Any) -> Any:
    """Record the sharding of one more value; a no-op outside `recorded_shardings`."""
    recorded = _RECORDED.get()
    if recorded is not None and sharding is not None and isinstance(array, Tracer):
        _RECORDED.set((*recorded, (array, sharding)))
    return array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithLayout:
    """An array that a program returns together with its known sharding.

    Attributes:
        array: the array.
        layout: its sharding, as for `record_sharding`.
    """

    array: Any
    layout: Any = dataclasses.field(metadata={"static": True})


def record_shardings(results: Any) -> Any:
    """The arrays of a tree, after `record_sharding` of each WithLayout."""

    def record(leaf: Any) -> Any:
        return record_sharding(leaf.array, leaf.layout) if isinstance(leaf, WithLayout) else leaf

    return jax.tree.map(record, results, is_leaf=lambda leaf: isinstance(leaf, WithLayout))


def block_sizes(
    axis: str, extent: int, count: int, sizes: tuple[int, ...] | None, errors: list[str]
) -> tuple[int, ...]:
    """How many valid rows each block of an axis has."""
    if extent % count:
        errors.append(
            f"{axis} has size {extent}, which {count} shards do not divide: pad it, "
            'iso.shard(x, mesh, spec, uneven="pad")'
        )
    elif sizes is not None and len(sizes) != count:
        errors.append(f"{axis} has {len(sizes)} blocks, and {count} shards")
    return (extent // count,) * count if sizes is None else sizes
