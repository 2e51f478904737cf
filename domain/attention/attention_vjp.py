"""Attention under a setup, and its VJP: `jax.shard_map` over what each device computes.

What a device does is in `ring_passes`. Arguments are checked before.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from isoshard.core.kit import products

from .ring_passes import backward, forward
from .setup import Axes, Extras, Setup


def attention(
    setup: Setup, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras
) -> tuple[jax.Array, jax.Array]:
    """Attention, sharded as the setup declares; the arguments are not checked.

    Args:
        setup: what is static.
        q: [batch, queries, heads, width].
        k: [batch, keys, key heads, width].
        v: [batch, keys, key heads, width of values].
        extras: masks, lengths and the key of dropout.

    Returns:
        [batch, queries, heads, width of values], of the dtype of `q`, and [batch, heads, queries],
        the logarithms of the sums of exponentials, of at least float32.
    """
    results: Any = _attention(setup, q, k, v, extras)
    return results


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(setup: Setup, q, k, v, extras: Extras):
    return _forward(setup, q, k, v, extras)[0]


def _forward(setup: Setup, q, k, v, extras: Extras):
    out, log = jax.shard_map(
        functools.partial(_forward_on_shard, setup),
        mesh=setup.mesh,
        in_specs=(setup.spec,) * 3 + (extras.specs(setup),),
        out_specs=(setup.spec, setup.rows),
        axis_names=set(setup.manual),
        check_vma=False,
    )(q, k, v, extras)
    return (out, log), (q, k, v, extras, out, log)


def _forward_on_shard(setup: Setup, q, k, v, extras: Extras):
    out, log = forward(setup, q, k, v, extras)
    return out.astype(q.dtype), log


def _backward(setup: Setup, saved, cotangents):
    q, k, v, extras, out, log = saved
    dout, dlog = cotangents
    # A weight is the gradient of the logarithm of its row.
    delta = products(out, dout).swapaxes(1, 2) - dlog
    return gradients(setup, q, k, v, extras, dout, log, delta)


def gradients(
    setup: Setup,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    extras: Extras,
    dout: jax.Array,
    log: jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, Extras]:
    """The gradients of an attention."""
    mask = extras.specs(setup).mask if extras.added else None
    replicated = extras.shared(setup) if extras.added else ()
    grads = jax.shard_map(
        functools.partial(_backward_on_shard, setup, replicated),
        mesh=setup.mesh,
        in_specs=(setup.spec,) * 3 + (extras.specs(setup), setup.spec, setup.rows, setup.rows),
        out_specs=(*(setup.spec,) * 3, mask),
        axis_names=set(setup.manual),
        check_vma=False,
    )(q, k, v, extras, dout, log, delta)
    return (*grads[:3], Extras(grads[3]))


def _backward_on_shard(setup: Setup, replicated: Axes, q, k, v, extras: Extras, dout, log, delta):
    """Gradients on one device; that of a replicated mask is summed over its replicas."""
    dq, dk, dv, mask = backward(setup, q, k, v, extras, dout, log, delta, extras.added)
    if mask is not None:
        mask = jax.lax.psum(mask, replicated) if replicated else mask
        mask = mask.astype(extras.mask.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), mask


_attention.defvjp(_forward, _backward)
