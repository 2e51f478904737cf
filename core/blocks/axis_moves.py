"""Moving rows of an axis in blocks into other blocks over the same devices; no axis is gathered.

>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> mesh = make_mesh((4,), ("x",))
>>> before = AxisSplit((2, 2, 1, 0), 2, ("x",), mesh)
>>> rows = shard(jnp.array([1, 2, 3, 4, 5, 0, 0, 0]), mesh, ("x",))
>>> after = AxisSplit((0, 3, 1, 1), 3, ("x",), mesh)
>>> jax.jit(lambda x: move_axis(x, 0, before, after))(rows).reshape(4, 3).tolist()
[[0, 0, 0], [1, 2, 3], [4, 0, 0], [5, 0, 0]]
>>> jax.jit(lambda x: move_axis(x, 0, before, before, reverse=True))(rows).tolist()
[5, 4, 3, 2, 1, 0, 0, 0]

Each device receives its new rows, in one `ppermute` for each distance they come from.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .row_windows import plan_windows, read_window
from .splits import AxisSplit


def movable(before: AxisSplit | None, after: AxisSplit | None) -> bool:
    """Whether rows can go from these blocks to those: both over the same devices of a mesh."""
    return (
        before is not None
        and after is not None
        and bool(before.names)
        and before.mesh is not None
        and (before.names, before.mesh) == (after.names, after.mesh)
        and before.extent > 0
        and after.extent > 0
    )


def move_axis(
    x: Any, axis: int, before: AxisSplit, after: AxisSplit, shift: int = 0, *, reverse: bool = False
) -> Any:
    """Move the rows of an axis."""
    begins = np.cumsum((0, *after.sizes[:-1])) - shift
    if reverse:
        begins = before.extent - begins - np.array(after.sizes)
    plan = plan_windows(
        before.sizes, tuple(map(int, begins)), after.sizes, "zero", max(before.block, 1)
    )
    tables = [plan.table]
    if reverse:
        order = np.array(after.sizes)[:, None] - 1 - np.arange(plan.width)
        index = np.maximum(order, 0).astype(np.int32)
        plan = dataclasses.replace(plan, index=index)
        tables.append(index)
    spec = P(*(before.names if at == axis else None for at in range(x.ndim)))

    def shard(block: Any, tables: list[Any]) -> Any:
        index = tables[1] if reverse else None
        window = read_window(block, plan, tables[0], index, axis, before.names)
        short = after.block - window.shape[axis]
        widths = [(0, short if at == axis else 0, 0) for at in range(window.ndim)]
        return lax.pad(window, jnp.zeros((), window.dtype), widths)

    moved = jax.shard_map(
        shard,
        mesh=before.mesh,
        in_specs=(spec, [P(before.names)] * len(tables)),
        out_specs=spec,
        axis_names=set(before.names),
    )(x, tables)
    return _cleared(moved, axis, after) if reverse else moved


def _cleared(x: Any, axis: int, split: AxisSplit) -> Any:
    if split.extent == split.padded:
        return x
    valid = split.valid().reshape((-1,) + (1,) * (x.ndim - axis - 1))
    return jnp.where(valid, x, jnp.zeros((), x.dtype))


def at_home(split: AxisSplit, before: int, count: int) -> AxisSplit:
    """The blocks of `count` rows of which row `o` is, or is nearest to, row `o - before`.

    Example:
        >>> at_home(AxisSplit((2, 2, 1, 0), 2), 1, 6).sizes
        (3, 2, 1, 0)
    """
    rows = np.clip(np.arange(count) - before, 0, split.extent - 1)
    owners = np.searchsorted(np.cumsum(split.sizes), rows, side="right")
    sizes = tuple(np.bincount(owners, minlength=len(split.sizes)).tolist())
    return dataclasses.replace(split, sizes=sizes, block=max(sizes))


def in_chunks(split: AxisSplit, count: int) -> AxisSplit:
    """The blocks of `count` rows over the same devices, as `torch.chunk` makes them."""
    blocks = len(split.sizes)
    block = -(-count // blocks)
    sizes = tuple(max(0, min(block, count - at * block)) for at in range(blocks))
    return dataclasses.replace(split, sizes=sizes, block=block)
