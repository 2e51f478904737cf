"""The domain operators of the scaling table, and their formulas.

`n` is the number of devices, `b` the rows of a block, a row is one row of what is split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso

from .cases import (
    AXIS,
    CHANNELS,
    ROW,
    ROWS,
    Bytes,
    Case,
    Size,
    array,
    field,
    replicated,
)

SPEC = P(None, None, AXIS)
HEADS, WIDTH = 512, 2  # of attention; Ulysses takes a head per device at least
FEATURES, NEAREST = 3, 2
METHODS = ("windows", "xla")


def _field(function: Callable[..., Any], *kernel: int) -> Any:
    """A function of a field, and of a kernel of this shape if there is one."""

    def make(mesh: Mesh, size: Size) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        arguments = [field(mesh, size), *([replicated(mesh, *kernel)] if kernel else [])]
        options = {"method": size.split} if size.split in METHODS else {}
        return functools.partial(function, mesh=mesh, spec=SPEC, **options), tuple(arguments)

    return make


def _lifted(function: Callable[[Any], Any]) -> Any:
    """A function for whole arrays, of a field; what has the field's shape lies as it does."""
    lifted = iso.domain.lift(function)

    def make(mesh: Mesh, size: Size) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        def run(x: Any) -> Any:
            out = lifted(x)
            if isinstance(out, iso.UnevenArray) or out.shape != x.shape:
                return out
            return lax.with_sharding_constraint(out, NamedSharding(mesh, SPEC))

        return run, (field(mesh, size),)

    return make


def _attention(function: Callable[..., Any], **options: Any) -> Any:
    def make(mesh: Mesh, size: Size) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        operand = array(mesh, size, (1,), (HEADS, WIDTH))
        return functools.partial(function, mesh=mesh, axis=AXIS, **options), (
            operand,
            operand,
            operand,
        )

    return make


def _points(function: Callable[..., Any], *args: Any) -> Any:
    def make(mesh: Mesh, size: Size) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        def run(points: Any, queries: Any) -> Any:
            return function(points, queries, *args, mesh=mesh, axes=(AXIS, AXIS)).distances

        return run, (array(mesh, size, (), (FEATURES,)), array(mesh, size, (), (FEATURES,)))

    return make


def _graph(mesh: Mesh, size: Size) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Messages along a chain, in both directions."""
    like = array(mesh, size, (), (CHANNELS,))
    zeros = iso.shard(np.zeros(jax.tree.leaves(like)[0].shape, np.float32), mesh, P(AXIS))
    nodes = iso.UnevenArray(zeros, like.shape, like.sizes) if size.uneven else zeros
    each = np.arange(size.devices * size.rows - 1)
    ends = np.concatenate([each, each + 1]), np.concatenate([each + 1, each])
    graph = iso.domain.partition_graph(*ends, nodes)
    return lambda x: graph.segment_sum(graph.senders(x)), (like,)


def _normalized(x: Any) -> Any:
    """Batch norm, without weights."""
    mean = x.mean((0, 2, 3), keepdims=True)
    centered = x - mean
    return centered * lax.rsqrt((centered**2).mean((0, 2, 3), keepdims=True) + 1e-5)


def _rows(count: int) -> Bytes:
    return lambda size: count * ROW


def _sides(bytes: int = ROW) -> Bytes:
    return lambda size: size.sides * bytes


def _reduced(bytes: int) -> Bytes:
    """An all-reduce."""
    return lambda size: 2 * size.share * bytes


def _both(*parts: Bytes) -> Bytes:
    return lambda size: sum(part(size) for part in parts)


def _ring(times: int, width: int) -> Bytes:
    """Blocks of so many bytes per row that go round."""
    return lambda size: times * size.others * size.block * width


def _mirrored(size: Size) -> float:
    """The block of the mirrored device; of two, one has part of its larger block already."""
    return (size.rows - 1 if size.uneven and size.devices == 2 else size.block) * ROW


def _back(width: int) -> Bytes:
    """Blocks go round again, and their gradients; of two devices both passes receive the same."""
    return lambda size: (2 * size.others - (size.devices == 2)) * size.block * width


def _turned(times: int) -> Bytes:
    """An all-to-all of blocks of attention."""
    return lambda size: times * size.share * size.block * TOKEN


def _balanced(times: int) -> Bytes:
    """Blocks of attention into zigzag order; of two devices each has half of its own already."""
    return lambda size: times * size.block * TOKEN * (1 if size.devices > 2 else 0.5)


def _uneven_only(rows: Bytes, even: Bytes) -> Bytes:
    return lambda size: rows(size) if size.uneven else even(size)


TOKEN = HEADS * WIDTH * 4  # bytes of a row of queries, keys or values
KERNEL = CHANNELS * CHANNELS * 9 * 4
TALL = CHANNELS * CHANNELS * 16 * 4
_NONE = _rows(0)

CASES = (
    Case(
        "halo_exchange, 2 rows, wrap",
        _field(functools.partial(iso.domain.halo_exchange, width=2, axis=ROWS, mode="wrap")),
        _rows(4),
        _rows(4),
        ("4 rows", "4 rows"),
    ),
    Case(
        "conv 3 x 3",
        _field(functools.partial(iso.domain.conv, padding=1), CHANNELS, CHANNELS, 3, 3),
        _sides(),
        _both(_sides(), _reduced(KERNEL)),
        ("2 rows", "2 rows, all-reduce of the kernel"),
        ("even", "windows", "uneven"),
        differs={("even", "backward"): "XLA fetches the rows of the forward pass again"},
    ),
    Case(
        "conv 3 x 3, stride 2",
        _field(functools.partial(iso.domain.conv, padding=1, stride=2), CHANNELS, CHANNELS, 3, 3),
        _uneven_only(_sides(), _rows(1)),
        _both(_uneven_only(_sides(), _rows(1)), _reduced(KERNEL)),
        ("1 row; uneven 2", "1 row; uneven 2; all-reduce of the kernel"),
    ),
    Case(
        "conv_transpose 4 x 4, stride 2",
        _field(
            functools.partial(iso.domain.conv_transpose, padding=1, stride=2),
            CHANNELS,
            CHANNELS,
            4,
            4,
        ),
        _sides(),
        _both(_sides(), _reduced(TALL)),
        ("2 rows", "2 rows, all-reduce of the kernel"),
        ("even", "xla", "uneven"),
        differs={("xla", "backward"): "XLA gathers the axis"},
    ),
    Case(
        "max_pool 3, stride 2",
        _field(functools.partial(iso.domain.max_pool, window=3, stride=2, padding=1)),
        _uneven_only(_sides(), _rows(1)),
        _uneven_only(_sides(), _rows(1)),
        ("1 row; uneven 2", "1 row; uneven 2"),
        ("even", "xla", "uneven"),
        differs={("xla", "backward"): "XLA derives halos as wide as several blocks"},
    ),
    Case(
        "avg_pool 2",
        _field(functools.partial(iso.domain.avg_pool, window=2)),
        _uneven_only(_rows(1), _NONE),
        _uneven_only(_rows(1), _NONE),
        ("0; uneven 1 row", "0; uneven 1 row"),
        ("even", "xla", "uneven"),
        differs={("xla", "backward"): "XLA derives halos as wide as several blocks"},
    ),
    Case(
        "interpolate x 2, linear",
        _field(functools.partial(iso.domain.interpolate, scale=2, mode="linear")),
        _sides(),
        _sides(),
        ("2 rows", "2 rows"),
    ),
    Case(
        "pad 1, wrap",
        _field(
            functools.partial(iso.domain.pad, widths=((0, 0), (0, 0), (1, 1), (0, 0)), mode="wrap")
        ),
        _rows(1),
        _rows(1),
        ("1 row", "1 row"),
    ),
    Case(
        "roll by 1",
        _field(functools.partial(iso.domain.roll, shift=1, axis=ROWS)),
        _rows(1),
        _rows(1),
        ("1 row", "1 row"),
    ),
    Case(
        "cumsum",
        _field(functools.partial(iso.domain.cumsum, axis=ROWS)),
        lambda size: size.others * ROW,
        lambda size: size.others * ROW,
        ("n - 1 rows", "n - 1 rows"),
    ),
    Case(
        "ring_attention",
        _attention(iso.domain.ring_attention),
        _ring(2, TOKEN),
        _back(2 * TOKEN),
        ("n - 1 blocks of k, v", "twice that"),
        grows=True,
    ),
    Case(
        "ring_attention, causal",
        _attention(iso.domain.ring_attention, causal=True),
        _both(_ring(2, TOKEN), _balanced(4)),
        _both(_back(2 * TOKEN), _balanced(4)),
        ("n - 1 blocks of k, v; 4 blocks", "twice n - 1 blocks of k, v; 4 blocks"),
        ("even",),
        grows=True,
    ),
    Case(
        "ulysses_attention",
        _attention(iso.domain.ulysses_attention),
        _turned(4),
        _turned(4),
        ("4 blocks (n - 1) / n", "4 blocks (n - 1) / n"),
        grows=True,
    ),
    Case(
        "knn",
        _points(iso.domain.knn, NEAREST),
        _ring(1, FEATURES * 4),
        _ring(1, FEATURES * 4),
        ("n - 1 blocks of points", "n - 1 blocks of points"),
        grows=True,
    ),
    Case(
        "radius_search",
        _points(iso.domain.radius_search, 1.0, NEAREST),
        _ring(1, FEATURES * 4),
        _ring(1, FEATURES * 4),
        ("n - 1 blocks of points", "n - 1 blocks of points"),
        grows=True,
    ),
    Case(
        "segment_sum, a chain",
        _graph,
        _sides(CHANNELS * 4),
        _sides(CHANNELS * 4),
        ("2 rows", "2 rows"),
    ),
    Case(
        "lift: mean over rows",
        _lifted(lambda x: x.mean(ROWS)),
        _reduced(ROW),
        _NONE,
        ("all-reduce of a row", "0"),
    ),
    Case(
        "lift: softmax over rows",
        _lifted(lambda x: jax.nn.softmax(x, ROWS)),
        _reduced(2 * ROW),
        _reduced(ROW),
        ("all-reduce of 2 rows", "all-reduce of a row"),
    ),
    Case(
        "lift: batch norm",
        _lifted(_normalized),
        _reduced(2 * CHANNELS * 4),
        _reduced(2 * CHANNELS * 4),
        ("all-reduce of 2 numbers per channel", "likewise"),
    ),
    Case(
        "lift: fft over columns",
        _lifted(lambda x: jnp.abs(jnp.fft.fft(x, axis=3))),
        _NONE,
        _NONE,
        ("0", "0"),
        grows=True,
    ),
    Case(
        "lift: flip of rows",
        _lifted(lambda x: jnp.flip(x, ROWS)),
        _mirrored,
        _mirrored,
        ("1 block", "1 block"),
        grows=True,
        most=32,
    ),
    Case(
        "lift: sort of rows",
        _lifted(lambda x: jnp.sort(x, ROWS)),
        _ring(1, ROW),
        _ring(1, ROW),
        ("n - 1 blocks", "n - 1 blocks"),
        grows=True,
        differs={
            ("even", "forward"): "while channels or columns divide, XLA splits these instead",
            ("even", "backward"): "XLA sums each device's gradient of the gathered axis",
        },
    ),
)
