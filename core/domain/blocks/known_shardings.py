"""What an array tells of its layout: its sharding, and how many rows its blocks have.

An array says so itself, and an `UnevenArray` even where it is traced. A traced value of `jax.jit`
does not, so there it has to be given; one that `jax.grad` traces outside `jax.jit` still has its
array.

>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> points = shard(jnp.zeros((8, 3)), make_mesh((4,), ("x",)), ("x",))
>>> sharding_of(points).spec
P('x',)
>>> faults = []
>>> block_sizes("axis 0", 8, 4, None, faults), block_sizes("axis 1", 8, 3, None, faults)
((2, 2, 2, 2), (2, 2, 2))
>>> faults
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
        The sharding; None for a value that `jax.jit` traces and that tells none, and of NumPy's.
    """
    array = padded_of(value)
    if not isinstance(array, Tracer):
        return getattr(array, "sharding", None)
    if isinstance(value, UnevenArray) and value.layout is not None:
        return value.layout
    for known, sharding in _TOLD.get() or ():
        if known is array:
            return sharding
    return getattr(array.to_concrete_value(), "sharding", None)


def known_sharding_of(value: Any) -> Any:
    """As `sharding_of`; None also where it is open along an axis."""
    found = sharding_of(value)
    is_open = isinstance(found, NamedSharding) and P.UNCONSTRAINED in entries_of(found.spec)
    return None if is_open else found


_TOLD: contextvars.ContextVar[tuple[tuple[Any, Any], ...] | None] = contextvars.ContextVar(
    "told", default=None
)


@contextlib.contextmanager
def telling(layouts: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Give the layouts of traced values, for `sharding_of` inside.

    Args:
        layouts: pairs of a value and its sharding.
    """
    token = _TOLD.set((*(_TOLD.get() or ()), *layouts))
    try:
        yield
    finally:
        _TOLD.reset(token)


def inside() -> bool:
    """Whether a verb is being computed, on arrays whose layouts `telling` gives."""
    return _TOLD.get() is not None


def lies(array: Any, sharding: Any) -> Any:
    """Give the layout of one more value, inside `telling`; elsewhere nobody asks.

    Args:
        array: traced or not.
        sharding: its layout; may be open (P.UNCONSTRAINED) along some axes. None tells nothing.

    Returns:
        The array.
    """
    told = _TOLD.get()
    if told is not None and sharding is not None and isinstance(array, Tracer):
        _TOLD.set((*told, (array, sharding)))
    return array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithLayout:
    """An array that leaves a program together with what is known of its layout.

    Attributes:
        array: the array.
        layout: as for `lies`.
    """

    array: Any
    layout: Any = dataclasses.field(metadata={"static": True})


def said(results: Any) -> Any:
    """The arrays of a tree, after `lies` of each that comes with a layout."""

    def one(leaf: Any) -> Any:
        return lies(leaf.array, leaf.layout) if isinstance(leaf, WithLayout) else leaf

    return jax.tree.map(one, results, is_leaf=lambda leaf: isinstance(leaf, WithLayout))


def block_sizes(
    axis: str, extent: int, count: int, sizes: tuple[int, ...] | None, faults: list[str]
) -> tuple[int, ...]:
    """How many valid rows each block of an axis has.

    Args:
        axis: which, for messages.
        extent: its rows, padding included.
        count: shards that split it.
        sizes: those of an UnevenArray; None if all rows are valid.
        faults: is given what is wrong.

    Returns:
        One size per shard; of no use if there was a fault.
    """
    if extent % count:
        faults.append(
            f"{axis} has size {extent}, which {count} shards do not divide: pad it, "
            'iso.shard(x, mesh, spec, uneven="pad")'
        )
    elif sizes is not None and len(sizes) != count:
        faults.append(f"{axis} has {len(sizes)} blocks, and {count} shards")
    return (extent // count,) * count if sizes is None else sizes
