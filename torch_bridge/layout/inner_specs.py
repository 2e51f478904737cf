"""Shardings of the tensors that a wrapper is made of, from its own: quantized weights with scales.

An axis of an inner tensor is the wrapper's where it has as many elements, or divides them: packed
numbers and scales of blocks. It gets the mesh axes of that axis as far as they divide it.

>>> from isoshard import P, make_mesh
>>> weight = NamedSharding(make_mesh((2, 4), ("x", "y")), P("x", "y"))
>>> shapes = {"packed": (8, 16), "row scale": (8, 1), "block scale": (8, 2), "one scale": ()}
>>> {name: inner_sharding(weight, (8, 32), shape).spec for name, shape in shapes.items()}
{'packed': P('x', 'y'), 'row scale': P('x',), 'block scale': P('x',), 'one scale': P()}

A scale of groups of columns may be stored transposed:

>>> inner_sharding(weight, (8, 32), (4, 8)).spec
P('y', 'x')
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.runtime.caches import cached

Shape = tuple[int, ...]


def inner_sharding(sharding: NamedSharding, outer: Shape, inner: Shape) -> NamedSharding:
    """The sharding of an inner tensor.

    Args:
        sharding: of the wrapper.
        outer: the shape of the wrapper.
        inner: that of the inner tensor.
    """
    entries: list[tuple[str, ...]] = [()] * len(inner)
    for entry, axis in zip(sharding.spec, inner_axes(outer, inner), strict=False):
        if axis is not None:
            entries[axis] = _dividing(sharding, _names(entry), inner[axis])
    return NamedSharding(sharding.mesh, _spec(entries), memory_kind=sharding.memory_kind)


def outer_sharding(sharding: NamedSharding, outer: Shape, inner: Shape) -> NamedSharding:
    """The sharding of a wrapper, from that of an inner tensor: the opposite of `inner_sharding`.

    Args:
        sharding: of the inner tensor.
        outer: the shape of the wrapper.
        inner: that of the inner tensor.
    """
    spec = [*sharding.spec, *[None] * (len(inner) - len(sharding.spec))]
    entries = [
        () if axis is None else _dividing(sharding, _names(spec[axis]), extent)
        for extent, axis in zip(outer, inner_axes(outer, inner), strict=True)
    ]
    return NamedSharding(sharding.mesh, _spec(entries), memory_kind=sharding.memory_kind)


@cached(4096)
def inner_axes(outer: Shape, inner: Shape) -> tuple[int | None, ...]:
    """For each axis of a wrapper that axis of an inner tensor which goes along with it, or None.

    Equal sizes count more than those that divide, and equal positions more than others.

    Args:
        outer: the shape of the wrapper.
        inner: that of the inner tensor.

    Example:
        >>> inner_axes((64, 64), (64,)), inner_axes((64, 32), (32,)), inner_axes((8, 4), (2, 8))
        ((0, None), (None, 0), (1, 0))
    """
    options = [
        [None, *(axis for axis, size in enumerate(inner) if size > 1 and extent % size == 0)]
        for extent in outer
    ]
    choices = [
        choice
        for choice in itertools.product(*options)
        if len({*choice} - {None}) == len(choice) - choice.count(None)
    ]
    return max(choices, key=lambda choice: _fitness(choice, outer, inner))


_EXACT, _DIVIDES = 10, 2
"""One axis of equal size outweighs two that only divide, in positions of their own."""


def _fitness(choice: Sequence[int | None], outer: Shape, inner: Shape) -> int:
    return sum(
        (_EXACT if inner[axis] == outer[position] else _DIVIDES) + (axis == position)
        for position, axis in enumerate(choice)
        if axis is not None
    )


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _dividing(sharding: NamedSharding, names: tuple[str, ...], extent: int) -> tuple[str, ...]:
    """As many of the mesh axes, outermost first, as split an axis evenly."""
    size = 1
    for count, name in enumerate(names):
        size *= sharding.mesh.shape[name]
        if extent % size:
            return names[:count]
    return names


def _spec(entries: Sequence[tuple[str, ...]]) -> P:
    spec = [names[0] if len(names) == 1 else names or None for names in entries]
    while spec and spec[-1] is None:
        spec.pop()
    return P(*spec)
