"""Ulysses attention: all-to-all, so that each device has the full sequence of a few heads.

>>> import numpy as np
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> mesh = make_mesh((4,), ("seq",))
>>> x = np.random.default_rng(0).normal(size=(1, 32, 8, 16)).astype(np.float32)
>>> x = shard(x, mesh, (None, "seq"))
>>> out = ulysses_attention(x, x, x, mesh=mesh, axis="seq", causal=True)
>>> out.sharding.spec
P(None, 'seq')
>>> from .ring_attention import ring_attention
>>> ring = ring_attention(x, x, x, mesh=mesh, axis="seq", causal=True)
>>> float(abs(out - ring).max()) < 1e-5
True

Each of queries, keys, values and result moves once, whatever the number of devices, where a ring of
n moves keys and values n - 1 times. But there can be no more devices than heads, and each has the
full sequence of one head at least.

Source: Jacobs et al., DeepSpeed Ulysses (https://arxiv.org/abs/2309.14509), section 3.
"""

from __future__ import annotations

import functools

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import UnevenArray, any_framework

from . import attention_arguments
from .attention_arguments import AxisLike
from .attention_vjp import attention
from .positions import Positions
from .setup import Axes, Extras, Setup, count


@any_framework
def ulysses_attention(
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
    tile: int = 512,
) -> jax.Array | UnevenArray:
    """What `ring_attention` gives, by all-to-all instead of a ring.

    What moves: one shard each of q, k, v and the result, and as much again in the gradient. Key
    heads fewer than devices are repeated before they move, up to one per device.

    Args:
        q: [batch, queries, heads, width], a floating dtype.
        k: [batch, keys, key heads, width].
        v: [batch, keys, key heads, width of values].
        mesh: the devices.
        axis: the mesh axes that split queries, keys and values along the sequence.
        batch: the mesh axes that split the batch.
        heads: the mesh axes that split the heads.
        causal: a query sees the keys up to its own position.
        mask: [batch or 1, heads or 1, queries or 1, keys or 1]; of bool, True is visible; of any
            floats, it is added to the scaled scores, and has a gradient. Each device needs the
            full mask of its heads.
        query_seq_lengths: int[batch], how many queries of each sample count; the rest gives 0.
        key_value_seq_lengths: int[batch], how many keys of each sample are visible.
        scale: of the scores; 1 / sqrt(width) by default.
        dropout: the share of weights that is dropped; the rest is scaled up.
        key: of `jax.random`, for dropout; drops the same weights as in `ring_attention`.
        tile: queries and keys, at most, whose scores exist at once on a device.

    Returns:
        [batch, queries, heads, width of values], sharded as `q`, of its dtype; uneven if `q` is.

    Raises:
        SpecError, ShardingError, ValueError: as `ring_attention`.
        UnevenError: the sequence does not divide, or the heads do not over all these devices.

    Example:
        >>> mesh, x = jax.make_mesh((2,), ("seq",)), jax.numpy.ones((1, 8, 2, 4))
        >>> out = ulysses_attention(x, x, x, mesh=mesh, axis="seq", causal=True)
        >>> out.shape, out.sharding.spec
        ((1, 8, 2, 4), P(None, 'seq'))
    """
    args = attention_arguments.check(
        "ulysses_attention",
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
    shards = devices * count(args.mesh, args.heads)
    qkv = attention_arguments.divided(args, shards, "ulysses_attention: axis and heads")
    setup = Setup(
        mesh=args.mesh,
        ring=(),
        batch=args.batch,
        heads=args.heads + args.ring,
        queries=Positions(qkv[0].shape[1], devices, sizes=args.sizes[0]),
        keys=Positions(qkv[1].shape[1], devices, sizes=args.sizes[1]),
        causal=causal,
        scale=args.scale,
        rate=args.rate,
        tile=tile,
        mask_rotates=False,
    )
    attention_arguments.check_mask("ulysses_attention", mask, setup, args.extras)
    out = _run(setup, args.ring, args.heads, *qkv, args.extras)
    return attention_arguments.result(args, out, q)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(setup: Setup, ring: Axes, heads: Axes, q, k, v, extras: Extras) -> jax.Array:
    by_sequence = P(setup.batch or None, ring, heads or None)

    def turn(x, to_heads: bool):
        split, joined = (2, 1) if to_heads else (1, 2)
        return jax.shard_map(
            functools.partial(
                jax.lax.all_to_all,
                axis_name=ring,
                split_axis=split,
                concat_axis=joined,
                tiled=True,
            ),
            mesh=setup.mesh,
            in_specs=by_sequence if to_heads else setup.spec,
            out_specs=setup.spec if to_heads else by_sequence,
            axis_names=set(setup.manual),
            check_vma=False,
        )(x)

    return turn(attention(setup, turn(q, True), turn(k, True), turn(v, True), extras)[0], False)
