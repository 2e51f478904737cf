"""Attention of operands in blocks of any sizes, axes as torch has them.

The rule for `in_blocks`: what a function of global arrays is on `UnevenArray`s. Only the sequence
may be in blocks of unequal sizes, of queries and keys by the same mesh axes; for anything else
it returns NotImplemented.

>>> import numpy as np
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> x = np.ones((1, 2, 18, 8), np.float32)
>>> sizes = (None, None, (5, 2, 7, 4), None)
>>> u = shard(x, make_mesh((4,), ("x",)), (None, None, "x"), uneven="pad", sizes=sizes)
>>> static = Attention(True, 1.0)
>>> out, log = jax.jit(lambda u: attend_in_blocks(static, u, u, u, None))(u)
>>> out.sizes[2], log.sizes[2]
((5, 2, 7, 4), (5, 2, 7, 4))
>>> attend_in_blocks(static, u, x, x, None)               # keys are unsplit
NotImplemented
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import AxisSplit, UnevenArray, entries_of, key_of, pack_axis
from isoshard.core.kit import spec_axis_names as axis_names

from .attention_axes import fold, fold_mask
from .attention_vjp import attention, gradients
from .partitioned_attention import Attention
from .positions import Positions
from .setup import Axes, Extras, Setup


def attend_in_blocks(
    static: Attention, q: Any, k: Any, v: Any, mask: Any, key_data: Any = None
) -> Any:
    """`static(q, k, v, mask, key_data)` for operands in blocks.

    Args:
        static: the attention's static arguments.
        q: (.., heads, queries, width).
        k: (.., key heads, keys, width).
        v: (.., key heads, keys, width of values).
        mask: replicated, or None.
        key_data: uint32[2], the key of dropout, or None.
    """
    setup = _setup(static, q, k, v, mask)
    if setup is None:
        return NotImplemented
    rows, columns, values = (fold(x.array) for x in (q, k, v))
    out, log = attention(setup, rows, columns, values, _extras(setup, mask, key_data, q))
    return _like(q, out.swapaxes(1, 2), v.shape[-1]), _like(q, log)


def gradients_in_blocks(
    static: Attention,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    log: Any,
    delta: Any,
    key_data: Any = None,
    wants_mask: bool = False,
) -> Any:
    """`static.gradients` for operands in blocks."""
    setup = _setup(static, q, k, v, mask)
    if setup is None or not all(_sizes(x) == _sizes(q) for x in (dout, log, delta)):
        return NotImplemented
    log, delta = (x.array.reshape(-1, q.shape[-3], x.array.shape[-1]) for x in (log, delta))
    packed = functools.partial(_extras, setup, key_data=key_data, q=q)
    extras, unpacked = packed(mask), None
    if wants_mask:
        _, unpacked = jax.vjp(lambda mask: packed(mask).mask, mask)
    rows, columns, values, cotangent = (fold(x.array) for x in (q, k, v, dout))
    grads = gradients(setup, rows, columns, values, extras, cotangent, log, delta)
    pairs = zip((q, k, v), grads[:3], strict=True)
    of_mask = None if unpacked is None else unpacked(grads[3].mask)[0]
    return *(_like(u, x.swapaxes(1, 2), u.shape[-1]) for u, x in pairs), of_mask


def _setup(static: Attention, q: Any, k: Any, v: Any, mask: Any) -> Setup | None:
    """The attention as a ring; None where it is none."""
    axes = [_axes(x) for x in (q, k, v)]
    if not axes[0] or axes[0] != axes[1] or axes[1] != axes[2] or isinstance(mask, UnevenArray):
        return None
    sizes = [axis_sizes for x in (q, k, v) if (axis_sizes := _sizes(x)) is not None]
    if len(sizes) < 3 or sizes[1] != sizes[2]:
        return None
    pairs = zip((q, k), sizes[:2], strict=True)
    lines = [
        Positions(x.array.shape[-2], len(axis_sizes), sizes=axis_sizes) for x, axis_sizes in pairs
    ]
    return Setup(
        mesh=q.layout.mesh,
        ring=axes[0],
        batch=(),
        heads=(),
        queries=lines[0],
        keys=lines[1],
        causal=static.causal,
        scale=static.scale,
        rate=static.rate,
        tile=static.tile,
        mask_rotates=mask is not None and mask.ndim > 1 and mask.shape[-2] == 1 < mask.shape[-1],
    )


def _axes(x: Any) -> Axes:
    """The mesh axes of the sequence; none unless that alone is in blocks, one per device."""
    if not isinstance(x, UnevenArray) or x.ndim < 3 or x.layout is None:
        return ()
    others = [size for axis, size in enumerate(x.sizes) if axis != x.ndim - 2]
    if any(size is not None for size in others) or x.sizes[-2] is None:
        return ()
    entry = (*entries_of(x.layout.spec), *[None] * x.ndim)[x.ndim - 2]
    return axis_names(entry) if isinstance(entry, str | tuple) else ()


def _sizes(x: Any) -> tuple[int, ...] | None:
    """The block sizes of a sequence: of the last axis but one, or of the last without a width."""
    sizes = [size for size in x.sizes if size is not None] if isinstance(x, UnevenArray) else []
    return sizes[0] if len(sizes) == 1 else None


def _like(u: UnevenArray, x: jax.Array, *width: int) -> UnevenArray:
    """A result in the blocks of `u`: its axes with another width, or without."""
    rank = len(u.shape) - 1
    shape, sizes = (*u.shape[:rank], *width), (*u.sizes[:rank], *[None] * len(width))
    array = x.reshape(*u.array.shape[:rank], *width)
    sharding: Any = u.layout
    entries = [*entries_of(sharding.spec), *[None] * u.ndim][:rank]
    layout = NamedSharding(sharding.mesh, P(*entries, *[None] * len(width)))
    return UnevenArray(array, shape, sizes, layout)


def _extras(setup: Setup, mask: Any, key_data: Any, q: UnevenArray) -> Extras:
    """The mask, its rows in the blocks of queries and its columns in those of keys; and the key."""
    key = None if key_data is None else key_of(key_data)
    if mask is None:
        return Extras(key=key)
    mask = fold_mask(mask, q.shape)
    for axis, line in enumerate((setup.queries, setup.keys), 2):
        if mask.shape[axis] > 1 and line.sizes is not None:
            split = AxisSplit(line.sizes, line.block, setup.ring, setup.mesh)
            mask = pack_axis(mask, axis, split)
    return Extras(mask, key=key)
