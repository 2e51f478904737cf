"""Which collectives turn one layout of an array into another.

>>> moves(((0,), ()), ((), (0,)), (8, 16), 4, (4, 2))
((LayoutExchange('all-to-all', (0,), 128),), 128)
>>> moves(((0,), (1,)), ((), (1,)), (8, 16), 4, (4, 2))
((LayoutExchange('all-gather', (0,), 256),), 256)

What is split further is sliced and sends nothing; it goes first, since it makes all else smaller.
Then axes move from one axis of the array to another, at last axes are gathered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from isoshard.core.runtime.caches import cached

from .factor_layouts import ArrayLayout, Split


@dataclasses.dataclass(frozen=True)
class LayoutExchange:
    """One collective.

    Attributes:
        kind: as HLO calls it.
        axes: numbers of the mesh axes along which devices talk.
        sent: bytes of its result on one device; of a reduce-scatter, of its operand.
        inner: of an all-gather, whether axes of the array lie outside the one that is gathered.
            The host's compiler puts the gathered axis outside first, and back afterwards.
    """

    kind: str
    axes: Split
    sent: int
    inner: bool = False

    def __repr__(self) -> str:
        """Short, as it is written."""
        return f"LayoutExchange({self.kind!r}, {self.axes}, {self.sent})"


def shard_shape(shape: Sequence[int], layout: ArrayLayout, mesh: Sequence[int]) -> tuple[int, ...]:
    """The shape of one device's block; of axes that do not divide the largest.

    Args:
        shape: the whole array's.
        layout: of the array.
        mesh: sizes of the mesh axes.
    """
    return _shard_shape(tuple(shape), layout, tuple(mesh))


@cached(1 << 14)
def _shard_shape(
    shape: tuple[int, ...], layout: ArrayLayout, mesh: tuple[int, ...]
) -> tuple[int, ...]:
    return tuple(
        [
            size if not split else -(-size // math.prod([mesh[one] for one in split]))
            for size, split in zip(shape, layout, strict=True)
        ]
    )


def shard_bytes(
    shape: Sequence[int], layout: ArrayLayout, itemsize: int, mesh: Sequence[int]
) -> int:
    """Bytes of one device's block.

    Args:
        shape: the whole array's.
        layout: of the array.
        itemsize: bytes of an element.
        mesh: sizes of the mesh axes.
    """
    return math.prod(shard_shape(shape, layout, mesh)) * itemsize


def moves(
    before: ArrayLayout,
    after: ArrayLayout,
    shape: Sequence[int],
    itemsize: int,
    mesh: Sequence[int],
) -> tuple[tuple[LayoutExchange, ...], int]:
    """The collectives from one layout to another.

    Args:
        before: the layout that there is.
        after: the one that is needed.
        shape: of the whole array.
        itemsize: bytes of an element.
        mesh: sizes of the mesh axes.

    Returns:
        The collectives in their order, and the bytes of one device's block at the end.
    """
    end = shard_bytes(shape, after, itemsize, mesh)
    if before == after:
        return (), end
    had = {one: axis for axis, split in enumerate(before) for one in split}
    has = {one: axis for axis, split in enumerate(after) for one in split}
    now = [list(split) for split in before]
    for one, axis in has.items():
        if one not in had:
            now[axis].append(one)
    found: list[LayoutExchange] = []

    def size() -> int:
        return shard_bytes(shape, tuple(map(tuple, now)), itemsize, mesh)

    moved: dict[tuple[int, int], list[int]] = {}
    for one, axis in had.items():
        if one in has and has[one] != axis:
            moved.setdefault((axis, has[one]), []).append(one)
    for (old, new), several in moved.items():
        for one in several:
            now[old].remove(one)
            now[new].append(one)
        found.append(LayoutExchange("all-to-all", tuple(several), size()))
    for axis in range(len(before)):
        gone = [one for one in before[axis] if one not in has]
        if gone:
            for one in gone:
                now[axis].remove(one)
            inner = math.prod(shard_shape(shape[:axis], tuple(map(tuple, now[:axis])), mesh)) > 1
            found.append(LayoutExchange("all-gather", tuple(gone), size(), inner))
    turned = [one for axis, split in enumerate(after) if tuple(now[axis]) != split for one in split]
    if turned:
        found.append(LayoutExchange("collective-permute", tuple(turned), end))
    return tuple(found), end
