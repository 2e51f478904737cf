"""The ring: keys and values go round, queries stay, and gradients come home with their keys.

With n devices the keys and values make n - 1 hops forward. Backward they make n - 1 again, and
their gradients n - 1 as well: they start with the second device, travel with the keys, and the last
hop brings them home, where the owner adds its own. Less is not possible in a ring.

A hop does not wait for what is computed meanwhile, nor the other way round, so XLA runs both at
once where the devices can. Beside the first and the last hop of the gradient a device computes one
half each of its own share, if that has two tiles.

Source: Liu, Zaharia and Abbeel, Ring Attention (https://arxiv.org/abs/2310.01889), algorithm 1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from isoshard.core.blocks.ring import permute_blocks
from isoshard.core.nn.dot_product_attention import wide

from . import tiled
from .masking import Visibility, spans
from .positions import Positions
from .setup import Extras, Setup

Blocks = tuple[Any, Any]
"""The number of a device's block of queries, and of its block of keys."""


def forward(
    setup: Setup,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    extras: Extras,
    blocks: Blocks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One device's share: its block of queries, and every block of keys as it comes by.

    Returns:
        [batch, queries, heads, width of values], and [batch, heads, queries], the logarithms of the
        sums of exponentials, minus infinity for a query that saw no key; of at least float32.
    """
    place = Place(setup, q, k, extras, blocks)
    rows = place.grouped(place.clean(q, setup.queries, 0))
    k, v = (place.clean(x, setup.keys, 1) for x in (k, v))
    running = tiled.start(rows, v.shape[-1])

    def attend(step, held, running):
        return tiled.attend(running, rows, held[0], held[1], place.sight(step, held))

    def hop(step, state):
        held, running = state
        return place.passed(held), attend(step, held, running)

    last = place.devices - 1
    state = place.hold(k, v), running
    if last:
        state = jax.lax.fori_loop(0, last, hop, state)
    out, log = tiled.finish(attend(last, *state))
    batch, queries, heads, _ = q.shape
    return out.reshape(*q.shape[:3], -1), log.reshape(batch, heads, queries)


def backward(
    setup: Setup,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    extras: Extras,
    dout: jax.Array,
    log: jax.Array,
    delta: jax.Array,
    wants_mask: bool,
    blocks: Blocks | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """One device's gradients: those of its queries, and of its keys and values."""
    place = Place(setup, q, k, extras, blocks)
    dtype = wide(q.dtype)
    dout, rows = (place.grouped(place.clean(x, setup.queries, 0)) for x in (dout, q))
    k, v = (place.clean(x, setup.keys, 1) for x in (k, v))
    log, delta = (place.grouped_rows(x) for x in (log, delta))
    given = tiled.Gradients(rows, dout, log, delta)
    zeros = None
    if wants_mask:
        zeros = jnp.zeros(extras.mask.shape, dtype)
    # What stays are the gradients of queries and of a mask with rows, what goes those of the rest.
    rides = setup.riding and wants_mask

    def more(step, held, stays, part=(0, 1)):
        begin = tiled.Slopes(
            stays[0],
            jnp.zeros(k.shape, dtype),
            jnp.zeros(v.shape, dtype),
            zeros if rides else stays[1],
        )
        found = tiled.gradients(begin, given, held[0], held[1], place.sight(step, held), part)
        stay, go = (None, found.mask) if rides else (found.mask, None)
        return (found.q, stay), (found.k, found.v, go)

    def hop(step, state):
        held, carried, stays = state
        arrived = place.passed(carried)
        stays, here = more(step, held, stays)
        return place.passed(held), _sum(arrived, here), stays

    own, last = place.hold(k, v), place.devices - 1
    stays = jnp.zeros(rows.shape, dtype), None if rides else zeros
    halves = 2 if last and spans(k.shape[1], setup.tile)[0] > 1 else 1
    stays, mine = more(0, own, stays, (0, halves))
    if last:
        held = place.passed(own)
        stays, carried = more(1, held, stays)
        if last > 1:
            state = place.passed(held), carried, stays
            if last > 2:
                state = jax.lax.fori_loop(2, last, hop, state)
            held, carried, stays = state
            arrived = place.passed(carried)
            stays, here = more(last, held, stays)
            carried = _sum(arrived, here)
        home = place.passed(carried)
        if halves > 1:
            stays, rest = more(0, own, stays, (1, 2))
            mine = _sum(mine, rest)
        mine = _sum(mine, home)
    dq, dk, dv = stays[0], mine[0], mine[1]
    mask = mine[2] if rides else stays[1]
    return dq.reshape(q.shape), dk, dv, mask


class Place:
    """This device's place in the ring.

    Args:
        setup: the attention.
        q: this device's queries.
        k: this device's keys.
        extras: its masks.
        blocks: which blocks these are; by default both that of its place in the ring.
    """

    def __init__(
        self,
        setup: Setup,
        q: jax.Array,
        k: jax.Array,
        extras: Extras,
        blocks: Blocks | None = None,
    ) -> None:
        """Find out where this device stands."""
        self.setup, self.extras, self.devices = setup, extras, setup.devices
        here: Any = jax.lax.axis_index(setup.ring) if setup.ring else 0
        self.blocks = (here, here) if blocks is None else blocks
        heads, keys = q.shape[2], k.shape[2]
        self.shape = (q.shape[0], keys, heads // keys)
        self.sizes = (q.shape[1], k.shape[1])

    def grouped(self, x: jax.Array) -> jax.Array:
        """[batch, queries, heads, width] as [batch, queries, key heads, group, width]."""
        return x.reshape(*x.shape[:2], *self.shape[1:], x.shape[-1])

    def clean(self, x: jax.Array, line: Positions, which: int) -> jax.Array:
        """The block of queries (0) or of keys (1) with 0 for padding, which may hold anything."""
        if line.sizes is None:
            return x
        places = self.blocks[which] * x.shape[1] + jnp.arange(x.shape[1])
        return jnp.where(line.valid(places)[:, None, None], x, 0)

    def grouped_rows(self, x: jax.Array) -> jax.Array:
        """[batch, heads, queries] as [batch, key heads, group, queries], with 0 for padding."""
        line, queries = self.setup.queries, x.shape[2]
        if line.sizes is not None:
            x = jnp.where(line.valid(self.blocks[0] * queries + jnp.arange(queries)), x, 0)
        return x.reshape(*self.shape, queries)

    def hold(self, k: jax.Array, v: jax.Array) -> tuple[Any, Any, Any]:
        """What goes round: keys, values, and a mask of keys."""
        return k, v, self.extras.mask if self.setup.riding else None

    def passed(self, held: Any) -> Any:
        """What the device before holds."""
        around = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        mesh, ring = self.setup.mesh, self.setup.ring
        return permute_blocks(held, mesh, ring, around)

    def sight(self, step: Any, held: tuple[Any, Any, Any]) -> Visibility:
        """What this device's queries see of the keys that are here after so many hops."""
        extras = self.extras._replace(mask=held[2]) if self.setup.riding else self.extras
        rows, columns = self.blocks
        blocks = (rows, (columns - step) % self.devices if self.setup.ring else columns)
        return Visibility(self.setup, extras, self.shape, blocks, self.sizes)


def _sum(a, b):
    return jax.tree.map(jnp.add, a, b)
