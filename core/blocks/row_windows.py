"""Windows: each device gets the rows it needs, from whichever devices have them.

Everything that reads neighbours is the same exchange: device d needs rows `starts[d]` up to
`starts[d] + needs[d]` of an axis whose blocks have any sizes. For each distance between reader and
owner there is one `ppermute`, of the longest slice at that distance. Rows that every device has
itself, the core of the window, stay together; those around it are looked up in the slices.

>>> plan = plan_windows((5, 2, 7, 4), starts=(-1, 4, 6, 13), needs=(7, 4, 9, 6))
>>> plan.width                                       # rows of the widest window
9
>>> [(move.hop, move.length) for move in plan.moves]     # own rows, and one from either side
[(-1, 1), (0, 7), (1, 1)]
>>> plan.core
Core(move=1, first=1, last=3, start=0)

What a window reads before row 0 and after the last one is a fill value, or follows a mode of
`np.pad`: "wrap", "edge", "reflect" or "symmetric".
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from isoshard.core.runtime._jax_internals.undocumented import linear_call

Axes = str | tuple[str, ...]

MODES = ("zero", "wrap", "edge", "reflect", "symmetric")


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """Rows that travel one distance.

    Attributes:
        hop: owner's number less reader's; 0 for rows that stay.
        length: rows sent.
        pairs: of owner and reader, as `ppermute` takes them.
        shifted: whether an owner's valid rows do not stand first in what it slices.
        place: where the slice stands in the windows, if all are whole and in the same place.
    """

    hop: int
    length: int
    pairs: tuple[tuple[int, int], ...]
    shifted: bool
    place: int | None


@dataclasses.dataclass(frozen=True)
class Core:
    """Rows of the window that every device has itself.

    Attributes:
        move: the move of the rows that stay.
        first: the first of them in the window.
        last: the last one, exclusive.
        start: where they begin in the slice that stays, if that is the same on every device.
    """

    move: int
    first: int
    last: int
    start: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class WindowPlan:
    """What each device sends, and where what it receives belongs; made by `plan_windows`.

    Attributes:
        width: rows of each window.
        moves: ordered by distance.
        numbers: (devices, 4 * moves + 2) int32. For each move: first row to slice, first valid row
            of the slice, place in the window, valid rows; then the first and the last row of the
            window that exist, the last one exclusive.
        index: (devices, rows) int32, which row of the window to take for each; None for all.
        core: the rows that every device has itself; None if there are none.
    """

    width: int
    moves: tuple[Move, ...]
    numbers: np.ndarray
    index: np.ndarray | None
    core: Core | None

    @property
    def rows_received(self) -> int:
        """How many rows a device receives at most."""
        return sum(move.length for move in self.moves if move.hop)


@functools.lru_cache(maxsize=1024)
def plan_windows(
    sizes: tuple[int, ...],
    starts: tuple[int, ...],
    needs: tuple[int, ...],
    mode: str = "zero",
    block: int | None = None,
) -> WindowPlan:
    """Work out an exchange.

    Example:
        >>> plan_windows((2, 2), (-1, 1), (4, 4), "reflect").index
        array([[1, 0, 1, 2],
               [0, 1, 2, 1]], dtype=int32)
    """
    total, block = sum(sizes), block or max(sizes)
    if mode in ("zero", "wrap"):
        return _plan(sizes, starts, needs, mode == "wrap", block, None)
    rows = [
        reflected(np.arange(start, start + max(need, 1)), total, mode)
        for start, need in zip(starts, needs, strict=True)
    ]
    lows = tuple(int(row.min()) for row in rows)
    spans = tuple(int(row.max()) + 1 - low for row, low in zip(rows, lows, strict=True))
    index = np.zeros((len(sizes), max(*needs, 1)), np.int32)
    for line, row, low in zip(index, rows, lows, strict=True):
        line[: len(row)] = row - low
    return _plan(sizes, lows, spans, False, block, index)


def reflected(rows: np.ndarray, total: int, mode: str) -> np.ndarray:
    """Which existing row stands for each of `rows`, of an axis of `total` rows.

    Example:
        >>> reflected(np.arange(-3, 7), 4, "reflect").tolist()
        [3, 2, 1, 0, 1, 2, 3, 2, 1, 0]
    """
    if mode == "edge" or total == 1:
        return np.clip(rows, 0, total - 1)
    if mode == "wrap":
        return rows % total
    period = 2 * total - (2 if mode == "reflect" else 0)
    rows = rows % period
    return np.where(rows < total, rows, period - rows - (mode == "symmetric"))


def _plan(
    sizes: tuple[int, ...],
    starts: tuple[int, ...],
    needs: tuple[int, ...],
    wrap: bool,
    block: int,
    index: np.ndarray | None,
) -> WindowPlan:
    devices, total = len(sizes), sum(sizes)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    width = max(*needs, 1)
    pieces: dict[int, dict[int, tuple[int, int, int]]] = {0: {}}  # hop: reader: row, count, place
    ends = [0] * devices
    for reader, (start, need) in enumerate(zip(starts, needs, strict=True)):
        turns = range(start // total, (start + need - 1) // total + 1) if wrap else range(1)
        ends[reader] = 0 if wrap else min(max(-start, 0), need)
        for owner in (turn * devices + device for turn in turns for device in range(devices)):
            turn, device = divmod(owner, devices)
            first = int(offsets[device]) + turn * total
            low, high = max(start, first), min(start + need, first + sizes[device])
            if low < high:
                pieces.setdefault(owner - reader, {})[reader] = low - first, high - low, low - start
    moves, columns, core = [], [], None
    heads = filled = ends
    for hop in sorted(pieces):
        readers = pieces[hop]
        length = max((count for _, count, _ in readers.values()), default=0)
        if not length:
            continue
        send, skip = [0] * devices, [0] * devices
        for reader, (row, _, _) in readers.items():
            owner = (reader + hop) % devices
            send[owner] = min(row, block - length)
            skip[owner] = row - send[owner]
        places = [readers[d][2] if d in readers else filled[d] for d in range(devices)]
        counts = [readers[d][1] if d in readers else 0 for d in range(devices)]
        filled = [p + n if n else p for p, n in zip(places, counts, strict=True)]
        if hop == 0 and max(places) < min(filled) and all(counts):
            start = 0 if len({*places}) == 1 else None
            core = Core(len(moves), max(places), min(filled), start)
        pairs = tuple(((reader + hop) % devices, reader) for reader in sorted(readers))
        same = {place if count == length else None for _, count, place in readers.values()}
        place = same.pop() if len(same) == 1 else None
        moves.append(Move(hop, length, pairs, any(skip), place))
        columns += [send, skip, places, counts]
    numbers = np.array([*columns, heads, filled], np.int32).T
    return WindowPlan(width, tuple(moves), numbers, index, core)


def read_window(
    block: Any,
    plan: WindowPlan,
    numbers: Any,
    index: Any,
    axis: int,
    names: Axes,
    fill: Any = 0,
) -> Any:
    """Exchange rows, inside `jax.shard_map`.

    Returns:
        The window: `plan.width` rows along `axis`, or as many as `plan.index` has columns. Rows
        beyond this device's own need are `fill`; with an index, any row of its window.
    """
    joined = not fill and _side_by_side(plan)
    numbers = numbers if joined else settled(numbers)
    pieces = tuple(
        _piece(block, move, numbers, 4 * k, axis, names) for k, move in enumerate(plan.moves)
    )
    if joined:
        window = jnp.concatenate(pieces, axis)
    else:
        parts = (jnp.zeros(_resized(block.shape, axis, plan.width), block.dtype),)
        if pieces:
            looked_up = functools.partial(_looked_up, plan, axis)
            taken_apart = functools.partial(_taken_apart, plan, axis)
            parts = linear_call(looked_up, taken_apart, numbers, pieces)
        if fill:
            parts = _filled(parts, numbers, axis, fill)
        window = jnp.concatenate(parts, axis)
    return window if index is None else jnp.take(window, index[0], axis, mode="clip")


def settled(numbers: Any) -> Any:
    """A device's numbers, computed once, however many loops over elements use them.

    XLA takes them out of the table again for every element of such a loop (on CPUs up to half of
    the time of a convolution), unless something stands between that is computed on its own: sorting
    is, also by what is in order already.

    Args:
        numbers: (1, n) int32, this device's row of a table.

    Example:
        >>> settled(jnp.array([[3, 1, 2]])).tolist()
        [[3, 1, 2]]
    """
    order = lax.broadcasted_iota(np.int32, numbers.shape, 1)
    return lax.sort((order, numbers), num_keys=1)[1]


def _looked_up(
    plan: WindowPlan, axis: int, numbers: Any, pieces: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The window in parts: before the core, the core, and after it; or all in one."""
    core = plan.core
    if core is None:
        return (_rows(0, plan.width, axis, numbers, pieces),)
    start = core.first - numbers[0, 4 * core.move + 2] if core.start is None else core.start
    return (
        _rows(0, core.first, axis, numbers, pieces),
        lax.dynamic_slice_in_dim(pieces[core.move], start, core.last - core.first, axis),
        _rows(core.last, plan.width, axis, numbers, pieces),
    )


def _rows(first: int, last: int, axis: int, numbers: Any, pieces: tuple[Any, ...]) -> Any:
    """Rows of the window, each looked up in its slice; zeros where no row is."""
    found = jnp.zeros(_resized(pieces[0].shape, axis, last - first), pieces[0].dtype)
    rows = jnp.arange(first, last, dtype=np.int32)
    line = (-1,) + (1,) * (found.ndim - axis - 1)
    for k, piece in enumerate(pieces):
        at = rows - numbers[0, 4 * k + 2]
        here = (at >= 0) & (at < numbers[0, 4 * k + 3])
        found = jnp.where(here.reshape(line), jnp.take(piece, at, axis, mode="clip"), found)
    return found


def _filled(parts: tuple[Any, ...], numbers: Any, axis: int, fill: Any) -> tuple[Any, ...]:
    """The parts, with `fill` where no row is; in the core, the second of them, all are."""
    filled, first = [], 0
    for k, part in enumerate(parts):
        rows = first + lax.broadcasted_iota(np.int32, part.shape, axis)
        exists = (rows >= numbers[0, -2]) & (rows < numbers[0, -1])
        filled.append(part if k == 1 else jnp.where(exists, part, jnp.array(fill, part.dtype)))
        first += part.shape[axis]
    return tuple(filled)


def _taken_apart(
    plan: WindowPlan, axis: int, numbers: Any, parts: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The transpose. JAX's own has updates and slices by turns, on which XLA's CPU compiler fails.

    (jaxlib 0.10: "Incorrect number of arguments passed to called function" in such a fusion.)
    """
    window = jnp.concatenate(parts, axis)
    # At least one row more: XLA computes a padded array once, and others for each slice again.
    places = plan.numbers[:, 2:-2:4].max(0)
    ends = (int(place) + move.length for place, move in zip(places, plan.moves, strict=True))
    more = max(plan.width + 1, *ends) - plan.width
    widths = [(0, more if a == axis else 0, 0) for a in range(window.ndim)]
    window = lax.pad(window, jnp.zeros((), window.dtype), widths)
    pieces = []
    for k, move in enumerate(plan.moves):
        piece = lax.dynamic_slice_in_dim(window, numbers[0, 4 * k + 2], move.length, axis)
        rows = lax.broadcasted_iota(np.int32, piece.shape, axis)
        pieces.append(jnp.where(rows < numbers[0, 4 * k + 3], piece, jnp.zeros_like(piece)))
    return tuple(pieces)


def _piece(block: Any, move: Move, numbers: Any, column: int, axis: int, names: Axes) -> Any:
    piece = block
    if move.length < block.shape[axis]:
        first = numbers[0, column]
        piece = lax.dynamic_slice_in_dim(block, first, move.length, axis)
    if move.shifted:
        longer = jnp.concatenate([piece, jnp.zeros_like(piece)], axis)
        piece = lax.dynamic_slice_in_dim(longer, numbers[0, column + 1], move.length, axis)
    return lax.ppermute(piece, names, move.pairs) if move.hop else piece


def _side_by_side(plan: WindowPlan) -> bool:
    """Whether the slices one after the other make every device's window.

    A device that gets no slice of some distance has zeros there, as `ppermute` gives them.
    """
    stays = any(move.hop == 0 and len(move.pairs) == len(plan.numbers) for move in plan.moves)
    edges = [0, *itertools.accumulate(move.length for move in plan.moves)]
    return stays and [*(move.place for move in plan.moves), plan.width] == edges


def _resized(shape: tuple[int, ...], axis: int, rows: int) -> tuple[int, ...]:
    return (*shape[:axis], rows, *shape[axis + 1 :])
