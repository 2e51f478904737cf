"""Running sums, products and extremes along an axis that is split.

>>> import numpy as np
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> rows = shard(np.arange(1, 9), make_mesh((4,), ("x",)), ("x",))
>>> cumsum(rows, 0).tolist()
[1, 3, 6, 10, 15, 21, 28, 36]
>>> cumprod(rows, 0, reverse=True).tolist()[-3:]
[336, 56, 8]

A local one, and the totals of the shards before: each device gets one total from each other, and no
rows (the compiler alone gathers the axis).
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
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import (
    ArrayLayout,
    UnevenArray,
    any_framework,
    entries_of,
    in_blocks,
    layout_of,
    lifted,
    partitioned,
    record_sharding,
    release,
)
from isoshard.core.kit import spec_entries_axis_names as axis_names

from .window_arguments import ArgumentErrors, is_integer

_JAX_CRASHES = (0, 11) <= release(jax.__version__) < (0, 12)
"""Whether compiling an empty residual of a `jax.shard_map`, as derivatives of products and extremes
have, ends the process. Lengths of 2**n - 1 have none."""


@dataclasses.dataclass(frozen=True)
class ScanOp:
    """A cumulative operator: of an array, of two numbers, and of many.

    Attributes:
        verb: its name.
        scan: of an array, an axis and whether from the end.
        join: of two arrays.
        total: of an array along an axis.
        start: the identity: 0, 1, or the extreme of the dtype, "low" or "high".
    """

    verb: str
    scan: Callable[..., Any]
    join: Callable[..., Any]
    total: Callable[..., Any]
    start: int | str

    def local(self, x: Any, axis: int, reverse: bool) -> Any:
        """Along an axis of each device's shard."""
        length = x.shape[axis]
        more = (1 << length.bit_length()) - 1 - length
        if not more or self.start == 0 or not _JAX_CRASHES:
            return self.scan(x, axis, reverse)
        widths = [(0, 0, 0)] * x.ndim
        widths[axis] = (more, 0, 0) if reverse else (0, more, 0)
        run = self.scan(lax.pad(x, self.first(x.dtype), widths), axis, reverse)
        return lax.slice_in_dim(run, widths[axis][0], widths[axis][0] + length, axis=axis)

    def first(self, dtype: Any) -> Any:
        """The identity, of a dtype."""
        if isinstance(self.start, int):
            return np.array(self.start, dtype)
        if jnp.issubdtype(dtype, jnp.inexact):
            return np.array(-np.inf if self.start == "low" else np.inf, dtype)
        limits = jnp.iinfo(dtype)
        return np.array(limits.min if self.start == "low" else limits.max, dtype)


SUM = ScanOp("cumsum", lax.cumsum, jnp.add, jnp.sum, 0)
PRODUCT = ScanOp("cumprod", lax.cumprod, jnp.multiply, jnp.prod, 1)
MAXIMUM = ScanOp("cummax", lax.cummax, jnp.maximum, jnp.max, "low")
MINIMUM = ScanOp("cummin", lax.cummin, jnp.minimum, jnp.min, "high")


@any_framework
def cumsum(x: Any, axis: int, *, reverse: bool = False, mesh: Any = None, spec: Any = None) -> Any:
    """Sum the rows up to each one.

    Args:
        x: a jax.Array or UnevenArray of numbers.
        axis: along which axis.
        reverse: sum from the last row instead of the first.
        mesh: with `spec`, the sharding of `x`; needed inside `jax.jit`, on Auto axes, not in
            `lift`.
        spec: any spelling of a spec.

    Returns:
        An array as `x`: same dtype, sharding and sizes.

    Raises:
        ShardingError: an argument does not fit.

    Example:
        >>> mesh = jax.make_mesh((4,), ("x",))
        >>> cumsum(jax.device_put(np.arange(8), jax.NamedSharding(mesh, P("x"))), 0).tolist()
        [0, 1, 3, 6, 10, 15, 21, 28]
    """
    return scan_axis(SUM, x, axis, reverse, mesh, spec)


@any_framework
def cumprod(x: Any, axis: int, *, reverse: bool = False, mesh: Any = None, spec: Any = None) -> Any:
    """Multiply the rows up to each one.

    Args:
        x: a jax.Array or UnevenArray of numbers.
        axis: along which axis.
        reverse: from the last row instead of the first.
        mesh: as for `cumsum`.
        spec: as for `cumsum`.

    Returns:
        An array as `x`: same dtype, sharding and sizes.

    Raises:
        ShardingError: an argument does not fit.

    Example:
        >>> sharding = jax.NamedSharding(jax.make_mesh((2,), ("x",)), P("x"))
        >>> cumprod(jax.device_put(np.array([4, 3, 1, 2]), sharding), 0).tolist()
        [4, 12, 12, 24]
    """
    return scan_axis(PRODUCT, x, axis, reverse, mesh, spec)


@any_framework
def cummax(x: Any, axis: int, *, reverse: bool = False, mesh: Any = None, spec: Any = None) -> Any:
    """Find the largest row up to each one.

    Args:
        x: a jax.Array or UnevenArray of numbers.
        axis: along which axis.
        reverse: from the last row instead of the first.
        mesh: as for `cumsum`.
        spec: as for `cumsum`.

    Returns:
        An array as `x`: same dtype, sharding and sizes.

    Raises:
        ShardingError: an argument does not fit.

    Example:
        >>> sharding = jax.NamedSharding(jax.make_mesh((2,), ("x",)), P("x"))
        >>> cummax(jax.device_put(np.array([4, 3, 1, 2]), sharding), 0).tolist()
        [4, 4, 4, 4]
    """
    return scan_axis(MAXIMUM, x, axis, reverse, mesh, spec)


@any_framework
def cummin(x: Any, axis: int, *, reverse: bool = False, mesh: Any = None, spec: Any = None) -> Any:
    """Find the least row up to each one.

    Args:
        x: a jax.Array or UnevenArray of numbers.
        axis: along which axis.
        reverse: from the last row instead of the first.
        mesh: as for `cumsum`.
        spec: as for `cumsum`.

    Returns:
        An array as `x`: same dtype, sharding and sizes.

    Raises:
        ShardingError: an argument does not fit.

    Example:
        >>> sharding = jax.NamedSharding(jax.make_mesh((2,), ("x",)), P("x"))
        >>> cummin(jax.device_put(np.array([4, 3, 1, 2]), sharding), 0).tolist()
        [4, 3, 1, 1]
    """
    return scan_axis(MINIMUM, x, axis, reverse, mesh, spec)


def scan_axis(kind: ScanOp, x: Any, axis: int, reverse: bool, mesh: Any, spec: Any) -> Any:
    """Run one of the four operators."""
    errors = ArgumentErrors(kind.verb)
    ndim = len(x.shape)
    inside = is_integer(axis) and -ndim <= axis < ndim
    errors.require(inside, f"axis {axis!r} is none of the {ndim} axes")
    errors.require(x.dtype != bool, "x is of bool; convert it to the integers to sum in")
    errors.raise_any()
    if lifted(x, mesh, spec):
        rule = functools.partial(scan_axis, kind, axis=axis, reverse=reverse, mesh=None, spec=None)
        return in_blocks(lambda x: kind.local(x, axis % ndim, reverse), rule)(x)
    layout = layout_of(x, mesh, spec, verb=kind.verb)
    out = _run(kind, layout, axis % ndim, reverse, x.array if layout.uneven else x)
    out = record_sharding(out, layout.sharding)
    return layout.wrap(out, x.shape, x.sizes) if isinstance(x, UnevenArray) else out


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(kind: ScanOp, layout: ArrayLayout, axis: int, reverse: bool, array: Any) -> Any:
    array = lax.with_sharding_constraint(array, layout.sharding)
    sizes = np.array(layout.sizes[axis], np.int32)[:, None]
    valid = (np.arange(layout.blocks[axis]) < sizes).reshape(-1)
    valid = valid.reshape((-1,) + (1,) * (array.ndim - axis - 1))
    first = kind.first(array.dtype)
    out = _totals(kind, layout, axis, reverse, jnp.where(valid, array, first))
    return jnp.where(valid, out, 0)  # so that no gradient comes from padding


def _totals(kind: ScanOp, layout: ArrayLayout, axis: int, reverse: bool, array: Any) -> Any:
    names, shards = layout.names[axis], len(layout.sizes[axis])
    if not names:
        return kind.local(array, axis, reverse)
    spec, manual = layout.manual()

    def shard(block: Any, index: Any) -> Any:
        return _of_shard(kind, axis, reverse, names, block, index)

    indices = np.arange(shards, dtype=np.int32)
    return jax.shard_map(
        shard,
        mesh=layout.mesh,
        in_specs=(spec, P(names)),
        out_specs=spec,
        axis_names=manual,
    )(array, indices)


def _of_shard(
    kind: ScanOp, axis: int, reverse: bool, names: tuple[str, ...], block: Any, index: Any
) -> Any:
    """The scan of this device's shard, joined with the totals of the shards before it."""
    local = kind.local(block, axis, reverse)
    last = 0 if reverse else block.shape[axis] - 1
    totals = lax.all_gather(lax.index_in_dim(local, last, axis), names, axis=axis, tiled=True)
    others = jnp.arange(totals.shape[axis])
    counted = others > index if reverse else others < index
    counted = counted.reshape((-1,) + (1,) * (block.ndim - axis - 1))
    before = kind.total(jnp.where(counted, totals, kind.first(totals.dtype)), axis)
    return kind.join(local, jnp.expand_dims(before, axis).astype(local.dtype))


def scan_where_split(verb: str, axis: int, x: Any) -> Any:
    """Run one of the four from the first row on, also where the compiler splits the axis.

    Example:
        >>> scan_where_split("cumsum", 0, jnp.arange(4.0)).tolist()
        [0.0, 1.0, 3.0, 6.0]
    """
    return _partitioned_scan((verb, axis), x)


def _unsharded(static: tuple[str, int], x: Any) -> Any:
    verb, axis = static
    return _KINDS[verb].scan(x, axis, False)


def _on_shards(static: tuple[str, int], mesh: Any, operands: Any, result: Any) -> Any:
    verb, axis = static
    (x,) = operands
    names = axis_names((*entries_of(x.sharding.spec), *[None] * len(x.shape))[axis])
    if not names:
        return mesh, lambda x: _unsharded(static, x), x.sharding, (x.sharding,)

    def run(x: Any) -> Any:
        return _of_shard(_KINDS[verb], axis, False, names, x, lax.axis_index(names))

    return mesh, run, x.sharding, (x.sharding,)


def _same_axes(static: tuple[str, int], shapes: tuple[tuple[int, ...], ...]) -> Any:
    axes = " ".join(f"a{axis}" for axis in range(len(shapes[0])))
    return f"{axes} -> {axes}", {}


_KINDS = {kind.verb: kind for kind in (SUM, PRODUCT, MAXIMUM, MINIMUM)}
_partitioned_scan = partitioned(_unsharded, _on_shards, _same_axes)
