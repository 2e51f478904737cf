"""Ring attention: a sequence split over devices attends to all of itself.

Every device keeps its queries; keys and values go from device to device. No device ever has the
full sequence, nor more scores than those of one tile: memory per device is that of its own shard.

>>> import numpy as np
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> mesh = make_mesh((2, 4), ("data", "seq"))
>>> x = np.random.default_rng(0).normal(size=(2, 64, 8, 16)).astype(np.float32)
>>> x = shard(x, mesh, ("data", "seq"))
>>> out = ring_attention(x, x, x, mesh=mesh, axis="seq", batch="data", causal=True)
>>> out.sharding.spec
P('data', 'seq')
>>> whole = jax.nn.dot_product_attention(*[jax.device_put(x, jax.devices()[0])] * 3, is_causal=True)
>>> float(abs(jax.device_put(out, whole.sharding) - whole).max()) < 1e-5
True

Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers for Near-Infinite
Context (https://arxiv.org/abs/2310.01889).
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from isoshard.core.kit import ShardingError, UnevenArray, any_framework

from . import attention_arguments
from .attention_arguments import AttentionArguments, AxisLike
from .attention_vjp import attention
from .positions import Positions
from .setup import Extras, Setup, count
from .zigzag import unzigzag, zigzag

Order = Literal["natural", "zigzag"]


@any_framework
def ring_attention(
    q: jax.Array | UnevenArray,
    k: jax.Array | UnevenArray,
    v: jax.Array | UnevenArray,
    *,
    mesh: Mesh,
    axis: AxisLike,
    batch: AxisLike | None = None,
    heads: AxisLike | None = None,
    causal: bool = False,
    mask: jax.Array | UnevenArray | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    key: jax.Array | None = None,
    order: Order = "natural",
    balance: bool | None = None,
    tile: int = 512,
) -> jax.Array | UnevenArray:
    """Attention over a sequence that is split; shapes are those of `jax.nn.dot_product_attention`.

    What moves: keys and values n - 1 times one shard, of n; in the gradient twice that, the
    gradients of 16-bit keys and values in float32. The gradient of an added mask is summed over the
    devices that have the same shard of it. Balancing adds a move of one shard of q, k, v
    and the result, and as much in the gradient. Key heads fewer than the devices that split the
    heads are repeated, up to one per device.

    Args:
        q: [batch, queries, heads, width], a floating dtype.
        k: [batch, keys, key heads, width]; `heads` is a multiple of `key heads`.
        v: [batch, keys, key heads, width of values].
        mesh: the devices.
        axis: the mesh axes that split queries, keys and values along the sequence.
        batch: the mesh axes that split the batch. How axes that are named nowhere split batch or
            heads is left to XLA.
        heads: the mesh axes that split the heads.
        causal: a query sees the keys up to its own position, counted from the start of both.
        mask: [batch or 1, heads or 1, queries or 1, keys or 1]; of bool, True is visible; of any
            floats, it is added to the scaled scores, and has a gradient. Its rows are split as
            their queries, so a device has full rows; with 1 for queries it rotates with the keys.
        query_seq_lengths: int[batch], how many queries of each sample count; the rest gives 0.
        key_value_seq_lengths: int[batch], how many keys of each sample are visible.
        scale: of the scores; 1 / sqrt(width) by default.
        dropout: the share of weights that is dropped; the rest is scaled up.
        key: of `jax.random`, for dropout. The same key drops the same weights on every mesh.
        order: "zigzag" declares that q, k, v (and a mask's rows and columns) are in zigzag order;
            the result is, too. See `zigzag`.
        balance: whether a causal attention in natural order is moved to zigzag order and back;
            None does where it can: no mask with rows, and 2n divides both lengths.
        tile: queries and keys, at most, whose scores exist at once on a device.

    Returns:
        [batch, queries, heads, width of values], sharded as `q`, of its dtype; uneven if `q` is.
        A query that sees no key gives 0.

    Raises:
        SpecError: an axis is none of the mesh, or is used twice.
        UnevenError: sequence or heads do not divide.
        ShardingError: an array is split over other mesh axes, its blocks do not fit, or it cannot
            be balanced.
        ValueError: shapes, dtypes or numbers do not fit together.

    Example:
        >>> import jax.numpy as jnp
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> x = jnp.ones((1, 6, 1, 1))
        >>> ring_attention(x, x, x, mesh=make_mesh((4,), ("x",)), axis="x")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.UnevenError: ring_attention: q: a sequence of 6 does not split over 4 devices. Pad it to 8 and give query_seq_lengths and key_value_seq_lengths, or pass an UnevenArray.
    """  # noqa: E501
    args = attention_arguments.check(
        "ring_attention",
        (q, k, v),
        mesh,
        (axis, batch, heads),
        mask,
        (query_seq_lengths, key_value_seq_lengths),
        scale,
        (dropout, key),
        tile,
    )
    devices = count(args.mesh, args.ring)
    zigzagged = _is_zigzag(args, devices, order)
    moved = not zigzagged and causal and devices > 1 and _balances(args, devices, balance)
    shards = count(args.mesh, args.heads)
    qkv = attention_arguments.divided(args, shards, "ring_attention: heads")
    padded_mask = args.extras.mask
    setup = Setup(
        mesh=args.mesh,
        ring=args.ring,
        batch=args.batch,
        heads=args.heads,
        queries=Positions(qkv[0].shape[1], devices, zigzagged or moved, args.sizes[0]),
        keys=Positions(qkv[1].shape[1], devices, zigzagged or moved, args.sizes[1]),
        causal=causal,
        scale=args.scale,
        rate=args.rate,
        tile=tile,
        mask_rotates=padded_mask is not None
        and padded_mask.shape[2] == 1
        and padded_mask.shape[3] > 1,
    )
    attention_arguments.check_mask("ring_attention", mask, setup, args.extras)
    out = _run(setup, moved, *qkv, args.extras)
    return attention_arguments.result(args, out, q)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(setup: Setup, moved: bool, q, k, v, extras: Extras) -> jax.Array:
    if not moved:
        return attention(setup, q, k, v, extras)[0]
    to_zigzag = functools.partial(zigzag, mesh=setup.mesh, axis=setup.ring)
    if setup.mask_rotates and extras.mask is not None:
        extras = extras._replace(mask=to_zigzag(extras.mask, dim=3))
    out: Any = attention(setup, to_zigzag(q), to_zigzag(k), to_zigzag(v), extras)[0]
    return unzigzag(out, mesh=setup.mesh, axis=setup.ring)


def _is_zigzag(args: AttentionArguments, devices: int, order: Order) -> bool:
    if order not in ("natural", "zigzag"):
        raise ValueError(f"order is 'natural' or 'zigzag', not {order!r}")
    if order == "zigzag" and (why := _obstacles(args, devices)):
        raise ShardingError(f"ring_attention: no sequence in zigzag order: {'; '.join(why)}")
    return order == "zigzag"


def _balances(args: AttentionArguments, devices: int, balance: bool | None) -> bool:
    why = _obstacles(args, devices)
    mask = args.extras.mask
    if mask is not None and mask.shape[2] > 1:
        why.append("a mask with rows would have to be moved as well")
    if balance and why:
        raise ShardingError(
            f"ring_attention cannot balance: {'; '.join(why)}. Pass balance=None, or sequence and "
            "mask in zigzag order with order='zigzag'."
        )
    return balance is not False and not why


def _obstacles(args: AttentionArguments, devices: int) -> list[str]:
    reasons = []
    if args.sizes != (None, None):
        reasons.append("uneven blocks have no halves")
    if wrong := {x.shape[1] for x in args.arrays if x.shape[1] % (2 * devices)}:
        reasons.append(f"length {sorted(wrong)} is no multiple of {2 * devices}")
    return reasons
