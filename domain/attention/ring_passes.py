"""The ring: keys and values rotate, queries do not, and gradients return with their keys.

With n devices the keys and values make n - 1 hops forward. Backward they make n - 1 again, and
their gradients n - 1 as well: they start with the second device, travel with the keys, and the last
hop returns them to the owner, which adds its own. Less is not possible in a ring.

A hop does not wait for what is computed meanwhile, nor the other way round, so XLA runs both at
once where the devices can. During the first and the last hop of the gradient a device computes one
half each of its own share, if that has two tiles.

Source: Liu, Zaharia and Abbeel, Ring Attention (https://arxiv.org/abs/2310.01889), algorithm 1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from isoshard.core.kit import dot_product_attention_wide as wide
from isoshard.core.kit import permute_blocks

from . import tiled
from .masking import Visibility, spans
from .positions import Positions
from .setup import Extras, Setup

Blocks = tuple[Any, Any]
"""The index of a device's block of queries, and of its block of keys."""


def forward(
    setup: Setup,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    extras: Extras,
    blocks: Blocks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One device's result: its block of queries against every block of keys in turn.

    Returns:
        [batch, queries, heads, width of values], and [batch, heads, queries], the logarithms of the
        sums of exponentials, minus infinity for a query that saw no key; of at least float32.
    """
    device = RingDevice(setup, q, k, extras, blocks)
    rows = device.grouped(device.clean(q, setup.queries, 0))
    k, v = (device.clean(x, setup.keys, 1) for x in (k, v))
    running = tiled.start(rows, v.shape[-1])

    def attend(step, kv, running):
        return tiled.attend(running, rows, kv[0], kv[1], device.visibility(step, kv))

    def hop(step, state):
        kv, running = state
        return device.rotated(kv), attend(step, kv, running)

    last = device.devices - 1
    state = device.kv(k, v), running
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
    device = RingDevice(setup, q, k, extras, blocks)
    dtype = wide(q.dtype)
    dout, rows = (device.grouped(device.clean(x, setup.queries, 0)) for x in (dout, q))
    k, v = (device.clean(x, setup.keys, 1) for x in (k, v))
    log, delta = (device.grouped_rows(x) for x in (log, delta))
    residuals = tiled.QueryResiduals(rows, dout, log, delta)
    zeros = None
    if wants_mask:
        zeros = jnp.zeros(extras.mask.shape, dtype)
    # Gradients of queries and of a mask with rows remain local, those of the rest rotate.
    mask_rotates = setup.mask_rotates and wants_mask

    def step_gradients(step, kv, local_grads, fraction=(0, 1)):
        begin = tiled.TileGradients(
            local_grads[0],
            jnp.zeros(k.shape, dtype),
            jnp.zeros(v.shape, dtype),
            zeros if mask_rotates else local_grads[1],
        )
        grads = tiled.gradients(
            begin, residuals, kv[0], kv[1], device.visibility(step, kv), fraction
        )
        local_mask, rotating_mask = (None, grads.mask) if mask_rotates else (grads.mask, None)
        return (grads.q, local_mask), (grads.k, grads.v, rotating_mask)

    def hop(step, state):
        kv, kv_grads, local_grads = state
        arrived = device.rotated(kv_grads)
        local_grads, step_grads = step_gradients(step, kv, local_grads)
        return device.rotated(kv), _sum(arrived, step_grads), local_grads

    own_kv, last = device.kv(k, v), device.devices - 1
    local_grads = jnp.zeros(rows.shape, dtype), None if mask_rotates else zeros
    halves = 2 if last and spans(k.shape[1], setup.tile)[0] > 1 else 1
    local_grads, home_grads = step_gradients(0, own_kv, local_grads, (0, halves))
    if last:
        kv = device.rotated(own_kv)
        local_grads, kv_grads = step_gradients(1, kv, local_grads)
        if last > 1:
            state = device.rotated(kv), kv_grads, local_grads
            if last > 2:
                state = jax.lax.fori_loop(2, last, hop, state)
            kv, kv_grads, local_grads = state
            arrived = device.rotated(kv_grads)
            local_grads, step_grads = step_gradients(last, kv, local_grads)
            kv_grads = _sum(arrived, step_grads)
        returned = device.rotated(kv_grads)
        if halves > 1:
            local_grads, second_half = step_gradients(0, own_kv, local_grads, (1, 2))
            home_grads = _sum(home_grads, second_half)
        home_grads = _sum(home_grads, returned)
    dq, dk, dv = local_grads[0], home_grads[0], home_grads[1]
    mask = home_grads[2] if mask_rotates else local_grads[1]
    return dq.reshape(q.shape), dk, dv, mask


class RingDevice:
    """This device in the ring.

    Args:
        setup: the attention.
        q: this device's queries.
        k: this device's keys.
        extras: its masks.
        blocks: the indices of these blocks; by default both its index in the ring.
    """

    def __init__(
        self,
        setup: Setup,
        q: jax.Array,
        k: jax.Array,
        extras: Extras,
        blocks: Blocks | None = None,
    ) -> None:
        """Compute the index of this device in the ring."""
        self.setup, self.extras, self.devices = setup, extras, setup.devices
        index: Any = jax.lax.axis_index(setup.ring) if setup.ring else 0
        self.blocks = (index, index) if blocks is None else blocks
        heads, keys = q.shape[2], k.shape[2]
        self.shape = (q.shape[0], keys, heads // keys)
        self.sizes = (q.shape[1], k.shape[1])

    def grouped(self, x: jax.Array) -> jax.Array:
        """[batch, queries, heads, width] as [batch, queries, key heads, group, width]."""
        return x.reshape(*x.shape[:2], *self.shape[1:], x.shape[-1])

    def clean(self, x: jax.Array, line: Positions, which: int) -> jax.Array:
        """The block of queries (0) or of keys (1) with 0 for padding, which may be anything."""
        if line.sizes is None:
            return x
        positions = self.blocks[which] * x.shape[1] + jnp.arange(x.shape[1])
        return jnp.where(line.valid(positions)[:, None, None], x, 0)

    def grouped_rows(self, x: jax.Array) -> jax.Array:
        """[batch, heads, queries] as [batch, key heads, group, queries], with 0 for padding."""
        line, queries = self.setup.queries, x.shape[2]
        if line.sizes is not None:
            x = jnp.where(line.valid(self.blocks[0] * queries + jnp.arange(queries)), x, 0)
        return x.reshape(*self.shape, queries)

    def kv(self, k: jax.Array, v: jax.Array) -> tuple[Any, Any, Any]:
        """The blocks that rotate: keys, values, and a mask of keys."""
        return k, v, self.extras.mask if self.setup.mask_rotates else None

    def rotated(self, kv: Any) -> Any:
        """The previous device's blocks."""
        around = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        mesh, ring = self.setup.mesh, self.setup.ring
        return permute_blocks(kv, mesh, ring, around)

    def visibility(self, step: Any, kv: tuple[Any, Any, Any]) -> Visibility:
        """The visibility of the keys that have arrived after `step` hops."""
        extras = self.extras._replace(mask=kv[2]) if self.setup.mask_rotates else self.extras
        rows, columns = self.blocks
        blocks = (rows, (columns - step) % self.devices if self.setup.ring else columns)
        return Visibility(self.setup, extras, self.shape, blocks, self.sizes)


def _sum(a, b):
    return jax.tree.map(jnp.add, a, b)
