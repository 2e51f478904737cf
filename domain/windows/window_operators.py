"""The halo exchange of every operator that reads neighbours, and the placement of its outputs.

An operator declares along each axis what its outputs read, and computes outputs from a window of
rows (a function of local arrays): `reach`. This module places each output: with the row
it is nearest to, so that `[5, 2, 7, 4]` stay `[5, 2, 7, 4]` under a convolution that keeps the
size. Each device then reads the window that its outputs need (`row_windows`), and computes.

Where all shards are equal, before and after, the compiler's own halos do the same; `method="auto"`
leaves it to them there, and takes windows elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import (
    ArrayLayout,
    ShardingError,
    UnevenArray,
    entries_of,
    in_blocks,
    layout_of,
    lifted,
    plan_windows,
    read_window,
    record_sharding,
    reflected,
    same_grid,
    sharding_of,
    unsplit_layout,
)
from isoshard.core.kit import spec_entries_axis_names as axis_names

from .reach import Operator, Reach, View


def apply(operator: Operator, x: Any, layout: ArrayLayout, *operands: Any) -> Any:
    """Apply an operator."""
    sizes = _check(operator, layout)
    array = _run(operator, layout, x.array if layout.uneven else x, *operands)
    array = record_sharding(array, _result_sharding(operator, layout, operands))
    shape = list(array.shape)
    valid: list[tuple[int, ...] | None] = list(x.sizes) if layout.uneven else [None] * len(shape)
    for (axis, _), size in zip(operator.reaches, sizes, strict=True):
        shape[axis] = sum(size)
        even = valid[axis] is None and len(set(size)) == 1  # before and after
        has_sizes = len(size) > 1 and (layout.uneven or len(set(size)) > 1) and not even
        valid[axis] = size if has_sizes else None
    for axis, size in enumerate(valid):
        shape[axis] = sum(size) if size is not None else shape[axis]
    return layout.wrap(array, shape, valid) if layout.uneven or any(valid) else array


def apply_or_record(operator: Operator, x: Any, mesh: Any, spec: Any, *operands: Any) -> Any:
    """Apply an operator to an array that has a sharding, or inside a lifted function.

    Returns:
        As `apply`; inside a lifted function, of the true shape.
    """
    if not lifted(x, mesh, spec):
        return apply(operator, x, layout_of(x, mesh, spec, verb=operator.verb), *operands)
    reads = dict(operator.reaches)

    def unsharded(x: Any, *operands: Any) -> Any:
        layout = unsplit_layout(x.shape)
        _check(operator, layout)
        return apply_full(operator, layout, x, *operands)

    def rule(u: Any, *operands: Any) -> Any:
        plain = isinstance(u, UnevenArray) and not any(
            isinstance(operand, UnevenArray) for operand in operands
        )
        if not plain or any(u.sizes[axis] is not None for axis in operator.free):
            return NotImplemented
        if not any(u.sizes[axis] is not None for axis in reads):
            return NotImplemented  # elementwise along what is in blocks
        layout = layout_of(u, verb=operator.verb).opened(operator.free)
        return apply(operator, u, layout, *operands)

    return in_blocks(unsharded, rule)(x, *operands)


def output_sizes(reach: Reach, sizes: tuple[int, ...], uneven: bool) -> tuple[int, ...]:
    """How many outputs each shard gets."""
    rows = sum(sizes)
    count = reach.outputs(rows)
    if not uneven and count % len(sizes) == 0:
        return (count // len(sizes),) * len(sizes)
    homes = np.clip(reach.home(np.arange(count), rows), 0, rows - 1)
    owners = np.searchsorted(np.cumsum(sizes), homes, side="right")
    return tuple(np.bincount(owners, minlength=len(sizes)).tolist())


def _check(operator: Operator, layout: ArrayLayout) -> list[tuple[int, ...]]:
    errors = []
    for axis, reach in operator.reaches:
        rows = layout.shape[axis]
        if rows == 0 or reach.outputs(rows) < 1:
            errors.append(f"axis {axis} of size {rows} gives no outputs")
        elif operator.mode == "reflect" and rows == 1 and reach.reads(np.arange(1), 1)[0][0] < 0:
            errors.append(f"axis {axis} has one row, which mode 'reflect' cannot repeat")
    errors += [
        f"axis {axis} is summed over, and padded" for axis in operator.free if layout.padded(axis)
    ]
    if errors:
        raise ShardingError(
            f"{operator.verb}: an array of shape {layout.shape} does not fit: {'; '.join(errors)}. "
            "Give larger axes or a smaller kernel; axes that are summed over, with no padding."
        )
    if operator.method == "xla" and not _equal_shards(operator, layout):
        raise ShardingError(
            f"{operator.verb}: method 'xla' takes shards that are equal before and after, and "
            f"those of shape {layout.shape} are not; leave it to method='auto'"
        )
    return [
        output_sizes(reach, layout.sizes[axis], layout.uneven) for axis, reach in operator.reaches
    ]


def uses_windows(operator: Operator, layout: ArrayLayout) -> bool:
    """Whether rows are exchanged here, rather than by what the compiler derives."""
    split = [reach for axis, reach in operator.reaches if len(layout.sizes[axis]) > 1]
    if not split or operator.method == "xla":
        return False
    derived = operator.mode == "zero" and all(reach.native for reach in split)
    return operator.method == "windows" or not derived or not _equal_shards(operator, layout)


def _equal_shards(operator: Operator, layout: ArrayLayout) -> bool:
    return not layout.uneven and all(
        reach.outputs(layout.shape[axis]) % len(layout.sizes[axis]) == 0
        for axis, reach in operator.reaches
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(operator: Operator, layout: ArrayLayout, array: Any, *operands: Any) -> Any:
    # Axes that are read and not known to be split are gathered: the compiler's
    # halos are not to be relied on inside a shard_map (jax 0.10: dilated and grouped kernels).
    read = tuple(axis for axis, _ in operator.reaches)
    array = lax.with_sharding_constraint(array, layout.sharding_but(closed=read))
    others = [axis for axis in range(array.ndim) if axis not in read and layout.padded(axis)]
    for axis in others:
        array = _masked(array, layout, axis)
    if uses_windows(operator, layout):
        out = _by_windows(operator, layout, array, operands)
    else:
        out = apply_full(operator, layout, array, *operands)
    for axis in others:
        out = _masked(out, layout, axis)
    return lax.with_sharding_constraint(out, _result_layout(operator, layout))


def _result_sharding(
    operator: Operator, layout: ArrayLayout, operands: tuple[Any, ...]
) -> NamedSharding:
    """The sharding of the result; an axis of the operand has the operand's."""
    sharding = _result_layout(operator, layout)
    operand_sharding = sharding_of(operands[0]) if operands else None
    if (
        operator.operand_axis is None
        or not isinstance(operand_sharding, NamedSharding)
        or not same_grid(operand_sharding.mesh, sharding.mesh)
    ):
        return sharding
    entries, (axis,) = [*entries_of(sharding.spec)], operator.free
    axes = axis_names(
        (*entries_of(operand_sharding.spec), *[None] * operands[0].ndim)[operator.operand_axis]
    )
    if axes and not {*axes} & {name for names in layout.names for name in names}:
        entries[axis] = axes
    return NamedSharding(sharding.mesh, P(*entries))


def _result_layout(operator: Operator, layout: ArrayLayout) -> NamedSharding:
    return layout.sharding_but(operator.free, tuple(axis for axis, _ in operator.reaches))


def apply_full(operator: Operator, layout: ArrayLayout, array: Any, *operands: Any) -> Any:
    """The outputs, where all rows are local."""
    views = []
    for axis, reach in operator.reaches:
        view, rows = _full_view(operator, layout, axis, reach)
        array = array if rows is None else jnp.take(array, rows, axis)
        views.append(view)
    return operator.local(array, tuple(views), *operands)


def _masked(array: Any, layout: ArrayLayout, axis: int) -> Any:
    sizes, block = np.array(layout.sizes[axis]), layout.blocks[axis]
    valid = (np.arange(block) < sizes[:, None]).reshape(-1)
    return jnp.where(valid.reshape((-1,) + (1,) * (array.ndim - axis - 1)), array, 0)


def _full_view(
    operator: Operator, layout: ArrayLayout, axis: int, reach: Reach
) -> tuple[View, np.ndarray | None]:
    """The window of an axis whose rows are all local, and the rows to take for it, if any."""
    rows = layout.shape[axis]
    outputs = np.arange(reach.outputs(rows))
    firsts, lasts = reach.reads(outputs, rows)
    start, stop = int(firsts.min()), int(lasts.max())
    tables = reach.tables(outputs, rows)
    if operator.mode == "zero" or (start >= 0 and stop <= rows):
        took = np.arange(rows) if layout.padded(axis) else None
        return View(0, len(outputs), (-start, stop - rows), tables), took
    took = reflected(np.arange(start, stop), rows, operator.mode)
    return View(start, len(outputs), (0, 0), tables), took


@dataclasses.dataclass(frozen=True, eq=False)
class _Exchange:
    """One axis along which windows are read: the exchange, and each device's tables."""

    axis: int
    names: tuple[str, ...]
    plan: Any
    outputs: int
    arrays: tuple[np.ndarray, ...]  # of the plan, starts, validity, index or none, tables
    full: bool


def _by_windows(
    operator: Operator, layout: ArrayLayout, array: Any, operands: tuple[Any, ...]
) -> Any:
    tables, shard = on_shards(operator, layout)
    spec, manual = layout.manual(operator.free)
    specs = [tuple(P(names) for _ in arrays) for names, arrays in tables]
    return jax.shard_map(
        shard,
        mesh=layout.mesh,
        in_specs=(spec, specs, jax.tree.map(lambda _: P(), operands)),
        out_specs=spec,
        axis_names=manual,
    )(array, [arrays for _, arrays in tables], operands)


Tables = list[tuple[tuple[str, ...], tuple[np.ndarray, ...]]]


def on_shards(operator: Operator, layout: ArrayLayout) -> tuple[Tables, Callable[..., Any]]:
    """The per-device function, and the tables it takes.

    Returns:
        For each such axis the mesh axes that split it, and arrays to split over them; and
        the function `(shard, tables, operands)`, of one tuple of local arrays for each axis.
    """
    split = [(axis, reach) for axis, reach in operator.reaches if len(layout.sizes[axis]) > 1]
    exchanges = [_exchange(operator, layout, axis, reach) for axis, reach in split]
    wholes = {
        axis: _full_view(operator, layout, axis, reach)
        for axis, reach in operator.reaches
        if (axis, reach) not in split
    }

    def shard(block: Any, tables: Any, operands: tuple[Any, ...]) -> Any:
        views = {axis: view for axis, (view, _) in wholes.items()}
        for axis, (_, rows) in wholes.items():
            if rows is not None:
                block = jnp.take(block, rows, axis)
        for exchange, (row, start, _, *rest) in zip(exchanges, tables, strict=True):
            index = rest.pop(0) if exchange.plan.index is not None else None
            block = read_window(
                block, exchange.plan, row, index, exchange.axis, exchange.names, operator.fill
            )
            views[exchange.axis] = View(start[0], exchange.outputs, (0, 0), tuple(rest))
        out = operator.local(block, tuple(views[axis] for axis, _ in operator.reaches), *operands)
        for exchange, (_, _, valid, *_) in zip(exchanges, tables, strict=True):
            if not exchange.full:
                shape = (-1,) + (1,) * (out.ndim - exchange.axis - 1)
                out = jnp.where(valid.reshape(shape), out, 0)
        return out

    return [(exchange.names, exchange.arrays) for exchange in exchanges], shard


def _exchange(operator: Operator, layout: ArrayLayout, axis: int, reach: Reach) -> _Exchange:
    sizes, rows = layout.sizes[axis], layout.shape[axis]
    outs = output_sizes(reach, sizes, layout.uneven)
    count, block = sum(outs), max(outs)
    begins = np.cumsum((0, *outs[:-1]))
    starts, needs = [], []
    for begin, size in zip(begins, outs, strict=True):
        first, last = reach.reads(np.arange(begin, begin + size), rows)
        starts.append(int(first.min()) if size else 0)
        needs.append(int(last.max()) - starts[-1] if size else 0)
    plan = plan_windows(sizes, tuple(starts), tuple(needs), operator.mode, layout.blocks[axis])
    which = np.minimum(begins[:, None] + np.arange(block), count - 1)
    tables = reach.tables(which.reshape(-1), rows)
    valid = np.arange(block) < np.array(outs)[:, None]
    arrays = [plan.table, np.array(starts, np.int32), valid.reshape(-1)]
    arrays += [] if plan.index is None else [plan.index]
    full = all(size == block for size in outs)
    return _Exchange(axis, layout.names[axis], plan, block, (*arrays, *tables), full)
