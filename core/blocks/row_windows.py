"""Windows: each device gets the rows it needs, from whichever devices have them.

Everything that reads neighbours is the same exchange: device d needs rows `starts[d]` up to
`starts[d] + needs[d]` of an axis whose blocks have any sizes. For each distance between reader and
owner there is one `ppermute`, of the longest slice at that distance. Rows that every device has
itself, the core of the window, are one slice; those around it are gathered from the slices.

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
from isoshard.core.runtime.caches import cached

Axes = str | tuple[str, ...]

MODES = ("zero", "wrap", "edge", "reflect", "symmetric")


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """Rows that travel one distance.

    Attributes:
        hop: owner's index minus reader's; 0 for local rows.
        length: rows sent.
        pairs: of owner and reader, as `ppermute` takes them.
        shifted: whether an owner's valid rows are not the first of its slice.
        offset: the slice's offset in the windows, if all are full and at the same offset.
    """

    hop: int
    length: int
    pairs: tuple[tuple[int, int], ...]
    shifted: bool
    offset: int | None


@dataclasses.dataclass(frozen=True)
class Core:
    """Rows of the window that every device has itself.

    Attributes:
        move: the index of the move of local rows.
        first: the first of them in the window.
        last: the last one, exclusive.
        start: their offset in the local slice, if it is the same on every device.
    """

    move: int
    first: int
    last: int
    start: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class WindowPlan:
    """The rows each device sends, and the offsets of those it receives; by `plan_windows`.

    Attributes:
        width: rows of each window.
        moves: ordered by distance.
        table: (devices, 4 * moves + 2) int32. For each move: first row to slice, first valid row
            of the slice, offset in the window, valid rows; then the first and the last row of the
            window that exist, the last one exclusive.
        index: (devices, rows) int32, which row of the window to take for each; None for all.
        core: the rows that every device has itself; None if there are none.
    """

    width: int
    moves: tuple[Move, ...]
    table: np.ndarray
    index: np.ndarray | None
    core: Core | None

    @property
    def rows_received(self) -> int:
        """How many rows a device receives at most."""
        return sum(move.length for move in self.moves if move.hop)


@cached(1024)
def plan_windows(
    sizes: tuple[int, ...],
    starts: tuple[int, ...],
    needs: tuple[int, ...],
    mode: str = "zero",
    block: int | None = None,
) -> WindowPlan:
    """Plan an exchange.

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
    """The existing row that replaces each of `rows`, of an axis of `total` rows.

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
    slices: dict[int, dict[int, tuple[int, int, int]]] = {0: {}}  # hop: reader: row, count, offset
    ends = [0] * devices
    for reader, (start, need) in enumerate(zip(starts, needs, strict=True)):
        turns = range(start // total, (start + need - 1) // total + 1) if wrap else range(1)
        ends[reader] = 0 if wrap else min(max(-start, 0), need)
        for owner in (turn * devices + device for turn in turns for device in range(devices)):
            turn, device = divmod(owner, devices)
            first = int(offsets[device]) + turn * total
            low, high = max(start, first), min(start + need, first + sizes[device])
            if low < high:
                slices.setdefault(owner - reader, {})[reader] = low - first, high - low, low - start
    moves, columns, core = [], [], None
    heads = filled = ends
    for hop in sorted(slices):
        readers = slices[hop]
        length = max((count for _, count, _ in readers.values()), default=0)
        if not length:
            continue
        send, skip = [0] * devices, [0] * devices
        for reader, (row, _, _) in readers.items():
            owner = (reader + hop) % devices
            send[owner] = min(row, block - length)
            skip[owner] = row - send[owner]
        in_window = [readers[d][2] if d in readers else filled[d] for d in range(devices)]
        counts = [readers[d][1] if d in readers else 0 for d in range(devices)]
        filled = [p + n if n else p for p, n in zip(in_window, counts, strict=True)]
        if hop == 0 and max(in_window) < min(filled) and all(counts):
            start = 0 if len({*in_window}) == 1 else None
            core = Core(len(moves), max(in_window), min(filled), start)
        pairs = tuple(((reader + hop) % devices, reader) for reader in sorted(readers))
        same = {offset if count == length else None for _, count, offset in readers.values()}
        offset = same.pop() if len(same) == 1 else None
        moves.append(Move(hop, length, pairs, any(skip), offset))
        columns += [send, skip, in_window, counts]
    table = np.array([*columns, heads, filled], np.int32).T
    return WindowPlan(width, tuple(moves), table, index, core)


def read_window(
    block: Any,
    plan: WindowPlan,
    table: Any,
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
    table = table if joined else settled(table)
    slices = tuple(
        _slice_of(block, move, table, 4 * k, axis, names) for k, move in enumerate(plan.moves)
    )
    if joined:
        window = jnp.concatenate(slices, axis)
    else:
        segments = (jnp.zeros(_resized(block.shape, axis, plan.width), block.dtype),)
        if slices:
            looked_up = functools.partial(_looked_up, plan, axis)
            transposed = functools.partial(_transposed_window, plan, axis)
            segments = linear_call(looked_up, transposed, table, slices)
        if fill:
            segments = _filled(segments, table, axis, fill)
        window = jnp.concatenate(segments, axis)
    return window if index is None else jnp.take(window, index[0], axis, mode="clip")


def settled(table: Any) -> Any:
    """This device's table row, computed once, however many loops over elements use it.

    XLA takes them out of the table again for every element of such a loop (on CPUs up to half of
    the time of a convolution), unless an operation that is not fused separates them: a sort
    is such, also of sorted keys.

    Args:
        table: (1, n) int32, this device's row of a table.

    Example:
        >>> settled(jnp.array([[3, 1, 2]])).tolist()
        [[3, 1, 2]]
    """
    order = lax.broadcasted_iota(np.int32, table.shape, 1)
    return lax.sort((order, table), num_keys=1)[1]


def _looked_up(plan: WindowPlan, axis: int, table: Any, slices: tuple[Any, ...]) -> tuple[Any, ...]:
    """The window in segments: before the core, the core, and after it; or all in one."""
    core = plan.core
    if core is None:
        return (_rows(0, plan.width, axis, table, slices),)
    start = core.first - table[0, 4 * core.move + 2] if core.start is None else core.start
    return (
        _rows(0, core.first, axis, table, slices),
        lax.dynamic_slice_in_dim(slices[core.move], start, core.last - core.first, axis),
        _rows(core.last, plan.width, axis, table, slices),
    )


def _rows(first: int, last: int, axis: int, table: Any, slices: tuple[Any, ...]) -> Any:
    """Rows of the window, each gathered from its slice; zeros for missing rows."""
    window = jnp.zeros(_resized(slices[0].shape, axis, last - first), slices[0].dtype)
    rows = jnp.arange(first, last, dtype=np.int32)
    line = (-1,) + (1,) * (window.ndim - axis - 1)
    for k, source in enumerate(slices):
        at = rows - table[0, 4 * k + 2]
        in_slice = (at >= 0) & (at < table[0, 4 * k + 3])
        window = jnp.where(in_slice.reshape(line), jnp.take(source, at, axis, mode="clip"), window)
    return window


def _filled(segments: tuple[Any, ...], table: Any, axis: int, fill: Any) -> tuple[Any, ...]:
    """The segments, with `fill` for missing rows; the second, the core, has none."""
    filled, first = [], 0
    for k, segment in enumerate(segments):
        rows = first + lax.broadcasted_iota(np.int32, segment.shape, axis)
        exists = (rows >= table[0, -2]) & (rows < table[0, -1])
        filled.append(
            segment if k == 1 else jnp.where(exists, segment, jnp.array(fill, segment.dtype))
        )
        first += segment.shape[axis]
    return tuple(filled)


def _transposed_window(
    plan: WindowPlan, axis: int, table: Any, segments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The transpose. JAX's own has updates and slices by turns, on which XLA's CPU compiler fails.

    (jaxlib 0.10: "Incorrect number of arguments passed to called function" in such a fusion.)
    """
    window = jnp.concatenate(segments, axis)
    # At least one row more: XLA computes a padded array once, and others for each slice again.
    in_window = plan.table[:, 2:-2:4].max(0)
    ends = (int(offset) + move.length for offset, move in zip(in_window, plan.moves, strict=True))
    more = max(plan.width + 1, *ends) - plan.width
    widths = [(0, more if a == axis else 0, 0) for a in range(window.ndim)]
    window = lax.pad(window, jnp.zeros((), window.dtype), widths)
    slices = []
    for k, move in enumerate(plan.moves):
        source = lax.dynamic_slice_in_dim(window, table[0, 4 * k + 2], move.length, axis)
        rows = lax.broadcasted_iota(np.int32, source.shape, axis)
        slices.append(jnp.where(rows < table[0, 4 * k + 3], source, jnp.zeros_like(source)))
    return tuple(slices)


def _slice_of(block: Any, move: Move, table: Any, column: int, axis: int, names: Axes) -> Any:
    source = block
    if move.length < block.shape[axis]:
        first = table[0, column]
        source = lax.dynamic_slice_in_dim(block, first, move.length, axis)
    if move.shifted:
        longer = jnp.concatenate([source, jnp.zeros_like(source)], axis)
        source = lax.dynamic_slice_in_dim(longer, table[0, column + 1], move.length, axis)
    return lax.ppermute(source, names, move.pairs) if move.hop else source


def _side_by_side(plan: WindowPlan) -> bool:
    """Whether the concatenated slices are every device's window.

    A device that gets no slice of some distance has zeros there, as `ppermute` gives them.
    """
    has_own_rows = any(move.hop == 0 and len(move.pairs) == len(plan.table) for move in plan.moves)
    edges = [0, *itertools.accumulate(move.length for move in plan.moves)]
    return has_own_rows and [*(move.offset for move in plan.moves), plan.width] == edges


def _resized(shape: tuple[int, ...], axis: int, rows: int) -> tuple[int, ...]:
    return (*shape[:axis], rows, *shape[axis + 1 :])
