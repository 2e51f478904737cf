"""The ring: keys and values go round, queries stay, and gradients come home with their keys.

With n devices the keys and values make n - 1 hops forward. Backward they make n - 1 again, and
their gradients n - 1 as well: they start with the second device, travel with the keys, and the last
hop brings them home, where the owner adds its own part. Less is not possible in a ring.

A hop does not wait for what is computed meanwhile, nor the other way round, so XLA runs both at
once where the devices can.

Source: Liu, Zaharia and Abbeel, Ring Attention (https://arxiv.org/abs/2310.01889), algorithm 1.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from . import tiled
from .lines import Line
from .setup import Extras, Setup
from .sight import Sight


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(setup: Setup, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras) -> jax.Array:
    """Attention, laid out as the setup says; nothing is checked any more.

    Args:
        setup: what is static.
        q: [batch, queries, heads, width].
        k: [batch, keys, key heads, width].
        v: [batch, keys, key heads, width of values].
        extras: masks, lengths and the key of dropout.

    Returns:
        [batch, queries, heads, width of values], of the dtype of `q`.
    """
    return _forward(setup, q, k, v, extras)[0]


def _forward(setup: Setup, q, k, v, extras: Extras):
    out, log = jax.shard_map(
        functools.partial(_forward_here, setup),
        mesh=setup.mesh,
        in_specs=(setup.spec,) * 3 + (extras.specs(setup),),
        out_specs=(setup.spec, setup.rows),
        axis_names=set(setup.manual),
        check_vma=False,
    )(q, k, v, extras)
    return out, (q, k, v, extras, out, log)


def _backward(setup: Setup, saved, dout):
    q, k, v, extras, out, log = saved
    found = jax.shard_map(
        functools.partial(_backward_here, setup),
        mesh=setup.mesh,
        in_specs=(setup.spec,) * 3 + (extras.specs(setup), setup.spec, setup.rows, setup.spec),
        out_specs=(setup.spec,) * 3,
        axis_names=set(setup.manual),
        check_vma=False,
    )(q, k, v, extras, out, log, dout)
    return (*found, None)


attention.defvjp(_forward, _backward)


def _forward_here(setup: Setup, q, k, v, extras: Extras):
    """One device's part: its block of queries, and every block of keys as it comes by."""
    ring = _Ring(setup, q, k, extras)
    rows = ring.grouped(ring.clean(q, setup.queries))
    k, v = (ring.clean(x, setup.keys) for x in (k, v))
    running = tiled.start(rows, v.shape[-1])

    def attend(step, held, running):
        return tiled.attend(running, rows, held[0], held[1], ring.sight(step, held))

    def hop(step, state):
        held, running = state
        return ring.passed(held), attend(step, held, running)

    last = ring.devices - 1
    state = ring.hold(k, v), running
    if last:
        state = jax.lax.fori_loop(0, last, hop, state)
    out, log = tiled.finish(attend(last, *state))
    batch, queries, heads, _ = q.shape
    return out.reshape(*q.shape[:3], -1).astype(q.dtype), log.reshape(batch, heads, queries)


def _backward_here(setup: Setup, q, k, v, extras: Extras, out, log, dout):
    """One device's part of the gradients: those of its queries, and of its keys and values."""
    ring = _Ring(setup, q, k, extras)
    dtype = tiled.wide(q.dtype)
    dout = ring.grouped(ring.clean(dout, setup.queries))
    rows = ring.grouped(ring.clean(q, setup.queries))
    k, v = (ring.clean(x, setup.keys) for x in (k, v))
    out = ring.grouped(out)
    delta = jnp.moveaxis((out.astype(dtype) * dout.astype(dtype)).sum(-1), 1, -1)
    given = tiled.Gradients(rows, dout, log.reshape(delta.shape), delta)

    def more(step, held, dq):
        dq, dk, dv = tiled.gradients(dq, given, held[0], held[1], ring.sight(step, held))
        return dq, (dk, dv)

    def hop(step, state):
        held, carried, dq = state
        arrived = ring.passed(carried)
        dq, here = more(step, held, dq)
        return ring.passed(held), _sum(arrived, here), dq

    held, last = ring.hold(k, v), ring.devices - 1
    dq, mine = more(0, held, jnp.zeros(rows.shape, dtype))
    if last:
        held = ring.passed(held)
        dq, carried = more(1, held, dq)
        if last > 1:
            state = ring.passed(held), carried, dq
            if last > 2:
                state = jax.lax.fori_loop(2, last, hop, state)
            held, carried, dq = state
            arrived = ring.passed(carried)
            dq, here = more(last, held, dq)
            carried = _sum(arrived, here)
        mine = _sum(mine, ring.passed(carried))
    dk, dv = mine
    return dq.reshape(q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


class _Ring:
    """This device's place in the ring."""

    def __init__(self, setup: Setup, q, k, extras: Extras) -> None:
        self.setup, self.extras, self.devices = setup, extras, setup.devices
        self.here: Any = jax.lax.axis_index(setup.ring) if setup.ring else 0
        heads, keys = q.shape[2], k.shape[2]
        self.shape = (q.shape[0], keys, heads // keys)
        self.sizes = (q.shape[1], k.shape[1])

    def grouped(self, x):
        """[batch, queries, heads, width] as [batch, queries, key heads, group, width]."""
        return x.reshape(*x.shape[:2], *self.shape[1:], x.shape[-1])

    def clean(self, x, line: Line):
        """The block with 0 where it is padding, which may hold anything."""
        if line.sizes is None:
            return x
        places = self.here * x.shape[1] + jnp.arange(x.shape[1])
        return jnp.where(line.valid(places)[:, None, None], x, 0)

    def hold(self, k, v) -> tuple[Any, Any, Any]:
        """What goes round: keys, values, and a mask of keys."""
        return k, v, self.extras.mask if self.setup.riding else None

    def passed(self, held):
        """What the device before holds."""
        around = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.setup.ring, around), held)

    def sight(self, step, held) -> Sight:
        """What this device's queries see of the keys that are here after so many hops."""
        extras = self.extras._replace(mask=held[2]) if self.setup.riding else self.extras
        blocks = (self.here, (self.here - step) % self.devices)
        return Sight(self.setup, extras, self.shape, blocks, self.sizes)


def _sum(a, b):
    return jax.tree.map(jnp.add, a, b)
