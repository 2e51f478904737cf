"""Halos: each shard with rows of its neighbours on either side.

>>> import jax
>>> import numpy as np
>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> mesh = make_mesh((4,), ("x",))
>>> x = shard(np.arange(8), mesh, ("x",))
>>> halo_exchange(x, 1, 0, "wrap").reshape(4, 4)             # one line per shard
Array([[7, 0, 1, 2],
       [1, 2, 3, 4],
       [3, 4, 5, 6],
       [5, 6, 7, 0]], dtype=int32)

`jax.shard_map` may then compute from each. Inside it, `halo` is the same for one block:

>>> def mean(block):
...     wide = halo(block, 1, 0, "x", mode="edge")
...     return (wide[:-2] + wide[1:-1] + wide[2:]) / 3
>>> jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(x).tolist()[:3]
[0.3333333432674408, 1.0, 2.0]

A halo wider than a neighbour comes from several. Shards may be of any sizes, also empty.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from isoshard.core.kit import (
    MODES,
    ArrayLayout,
    Axes,
    ShardingError,
    UnevenArray,
    WindowPlan,
    any_framework,
    cached,
    describe_mesh,
    layout_of,
    plan_windows,
    read_window,
    record_sharding,
)

from .window_arguments import ArgumentErrors, is_integer

Width = int | tuple[int, int]


@any_framework
def halo_exchange(
    x: Any,
    width: Width,
    axis: int,
    mode: str = "zero",
    *,
    mesh: Any = None,
    spec: Any = None,
) -> Any:
    """Give every shard the rows before and after it.

    Args:
        x: a jax.Array or UnevenArray, split along `axis`.
        width: rows on either side, or a pair: before and after.
        axis: the axis; negative numbers count from the end.
        mode: the values before the first row and after the last: "zero", "wrap", "edge",
            "reflect" or "symmetric" (the last two as in `np.pad`).
        mesh: with `spec`, the sharding of `x`; needed inside `jax.jit`, on Auto axes.
        spec: any spelling of a spec.

    Returns:
        The shards with their halos, one after the other, sharded as `x`: along `axis` a shard of
        n rows has `before + n + after`. An UnevenArray if `x` is one.

    Raises:
        ShardingError: the axis is not split, or an argument does not fit.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.transfer.device_put import shard
        >>> x = shard(np.zeros((8, 3), np.float32), make_mesh((4,), ("x",)), ("x", None))
        >>> halo_exchange(x, 1, 1)
        Traceback (most recent call last):
            ...
        isoshard.core.errors.ShardingError: halo_exchange: axis 1 of an array of shape (8, 3) is not split, so there are no neighbours; pad it with iso.domain.pad, or split it over one of the mesh axes 'x' (4)
    """  # noqa: E501
    layout = layout_of(x, mesh, spec, verb="halo_exchange")
    ndim = len(layout.names)
    errors = ArgumentErrors("halo_exchange")
    before, after = _width(errors, width)
    errors.choice("mode", mode, MODES)
    inside = is_integer(axis) and -ndim <= axis < ndim
    errors.require(inside, f"axis {axis!r} is none of the {ndim} axes")
    errors.raise_any()
    axis %= ndim
    if not layout.names[axis]:
        raise ShardingError(
            f"halo_exchange: axis {axis} of an array of shape {layout.shape} is not split, so "
            "there are no neighbours; pad it with iso.domain.pad, or split it over one of the mesh "
            f"axes {describe_mesh(layout.mesh)}"
        )
    _check_rows(layout.sizes[axis], mode)
    array = _exchange(layout, axis, before, after, mode, x.array if layout.uneven else x)
    array = record_sharding(array, layout.sharding)
    if not layout.uneven:
        return array
    shape = list(layout.shape)
    sizes = list(x.sizes)
    sizes[axis] = tuple(size + before + after for size in layout.sizes[axis])
    shape[axis] = sum(sizes[axis])
    return UnevenArray(array, shape, sizes)


def halo(
    block: Any,
    width: Width,
    axis: int,
    axis_name: Axes,
    *,
    mode: str = "zero",
    sizes: tuple[int, ...] | None = None,
) -> Any:
    """Give this device's block the rows before and after it, inside `jax.shard_map`.

    Args:
        block: this device's block.
        width: rows on either side, or a pair: before and after.
        axis: the axis of the rows.
        axis_name: the mesh axis, or axes, that split it.
        mode: as for `halo_exchange`.
        sizes: valid rows of each device's block; by default all are.

    Returns:
        The block with its halos: `before + rows + after` along `axis`. With `sizes`, the valid
        rows come first, and what follows them is undefined.

    Raises:
        ShardingError: an argument does not fit.

    Example:
        >>> from isoshard.core.transfer.device_put import shard
        >>> x = shard(jnp.arange(8), jax.make_mesh((4,), ("x",)), jax.P("x"))
        >>> def change(block):                     # each row less the one before it
        ...     return block - halo(block, (1, 0), 0, "x", mode="wrap")[:-1]
        >>> jax.jit(jax.shard_map(change, mesh=x.sharding.mesh, out_specs=jax.P("x")))(x).tolist()
        [-7, 1, 1, 1, 1, 1, 1, 1]
    """
    errors = ArgumentErrors("halo")
    before, after = _width(errors, width)
    errors.choice("mode", mode, MODES)
    devices, rows = lax.axis_size(axis_name), block.shape[axis]
    sizes = (rows,) * devices if sizes is None else tuple(sizes)
    errors.require(
        len(sizes) == devices and all(0 <= size <= rows for size in sizes),
        f"sizes {sizes} are not one for each of {devices} devices, from 0 to {rows} rows",
    )
    errors.raise_any()
    _check_rows(sizes, mode)
    plan = _plan(sizes, before, after, mode, rows)
    index = lax.axis_index(axis_name)
    line = jnp.asarray(plan.table)[index][None]
    gather_index = None if plan.index is None else jnp.asarray(plan.index)[index][None]
    window = read_window(block, plan, line, gather_index, axis, axis_name)
    wide = before + rows + after
    short = wide - window.shape[axis]  # no block is full
    window = lax.pad(
        window,
        jnp.zeros((), window.dtype),
        [(0, short if a == axis else 0, 0) for a in range(window.ndim)],
    )
    if gather_index is not None and len({*sizes, rows}) > 1:
        valid = jnp.arange(wide, dtype=np.int32) < jnp.asarray(sizes)[index] + before + after
        window = jnp.where(valid.reshape((-1,) + (1,) * (window.ndim - axis - 1)), window, 0)
    return window


@cached(1024)
def _plan(sizes: tuple[int, ...], before: int, after: int, mode: str, block: int) -> WindowPlan:
    offsets = np.cumsum((0, *sizes[:-1]))
    starts = tuple(int(offset) - before for offset in offsets)
    needs = tuple(size + before + after for size in sizes)
    return plan_windows(sizes, starts, needs, mode, block)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _exchange(
    layout: ArrayLayout, axis: int, before: int, after: int, mode: str, array: Any
) -> Any:
    array = lax.with_sharding_constraint(array, layout.sharding)
    names, sizes = layout.names[axis], layout.sizes[axis]
    spec, manual = layout.manual()
    return jax.shard_map(
        lambda block: halo(block, (before, after), axis, names, mode=mode, sizes=sizes),
        mesh=layout.mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names=manual,
    )(array)


def _width(errors: ArgumentErrors, width: Any) -> tuple[int, int]:
    before, after = errors.per_axis("width", width, 2, least=0)
    return before, after


def _check_rows(sizes: tuple[int, ...], mode: str) -> None:
    rows = sum(sizes)
    if rows == 0 or (rows == 1 and mode == "reflect"):
        raise ShardingError(
            f"the axis has {rows} row{'s' * (rows != 1)} in all, which mode {mode!r} cannot extend"
        )
