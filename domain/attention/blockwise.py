"""Attention of unsplit sequences, tile by tile: memory is linear in their length.

What `ring_passes` computes on a ring of one device. The gradient computes the scores again, so no
array of queries by keys exists, forward or backward; nor does the mask, if it is a `TiledMask`.

>>> from .partitioned_attention import Attention
>>> q = jax.random.normal(jax.random.key(0), (1, 2, 300, 8))
>>> out, log = jax.jit(functools.partial(forward, Attention(True, 0.3)))(q, q, q, None)
>>> dense = attend(q, q, q, scale=0.3, causal=True)[0]
>>> out.shape, log.shape, bool(abs(out - dense).max() < 1e-5)
((1, 2, 300, 8), (1, 2, 300), True)
"""

from __future__ import annotations

import functools  # noqa: F401  (for the doctest)
from typing import TYPE_CHECKING, Any, cast

import jax

from isoshard.core.kit import TiledMask, key_of
from isoshard.core.kit import attend as attend  # for the doctest
from isoshard.core.kit import dot_product_attention_wide as wide

from . import ring_passes
from .attention_axes import fold, fold_mask, heads_of
from .positions import Positions
from .setup import Extras, Setup

if TYPE_CHECKING:
    from .partitioned_attention import Attention

SCORES = {"cpu": 1 << 20}
"""Scores of one head from which tiles are used, by platform: on a CPU they take as long as the
dense form with 512 queries and keys, 0.6 to 0.7 of its time with 1,024, 0.5 to 0.9 with 2,048."""

ACCELERATOR_SCORES = 1 << 24
"""The same of accelerators, whose memory holds the scores of 4,096 tokens, but not many of them."""

_SHORTEST = 256
"""Queries and keys of the smallest sequence that is tiled."""

_TILE = {"cpu": 256}
_ACCELERATOR_TILE = 512


def is_long(queries: int, keys: int, platform: str = "cpu") -> bool:
    """Whether an attention is computed in tiles.

    Example:
        >>> is_long(512, 512), is_long(2048, 2048), is_long(1, 1 << 20)
        (False, True, False)
        >>> is_long(2048, 2048, "tpu"), is_long(4096, 4096, "tpu")
        (False, True)
    """
    fewest = SCORES.get(platform, ACCELERATOR_SCORES)
    return queries * keys >= fewest and min(queries, keys) >= _SHORTEST


def forward(
    static: Attention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | TiledMask | None,
    key_data: jax.Array | None = None,
    indices: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The result and the logarithms of the sums, of at least float32; see `Attention.unsharded`."""
    setup = _setup(static, q, k)
    extras = _extras(_fold(mask, q), key_data, indices)
    out, log = ring_passes.forward(setup, fold(q), fold(k), fold(v), extras)
    out = out.swapaxes(1, 2).reshape(*q.shape[:-1], v.shape[-1])
    return out, log.reshape(q.shape[:-1])


def backward(
    static: Attention,
    dout: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | TiledMask | None,
    log: jax.Array,
    delta: jax.Array,
    wants_mask: bool = False,
    key_data: jax.Array | None = None,
    indices: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array | None, ...]:
    """The gradients of queries, keys, values, and of an added mask if `wants_mask`."""
    folded, unfold = _fold(mask, q), None
    if wants_mask and mask is not None and not isinstance(mask, TiledMask):
        folded, unfold = jax.vjp(lambda mask: _fold(mask, q), mask.astype(wide(q.dtype)))
    log, delta = (x.reshape(-1, heads_of(q), x.shape[-1]) for x in (log, delta))
    *grads, of_mask = ring_passes.backward(
        _setup(static, q, k),
        fold(q),
        fold(k),
        fold(v),
        _extras(folded, key_data, indices),
        fold(dout),
        log,
        delta,
        unfold is not None,
    )
    pairs = zip(grads, (q, k, v), strict=True)
    unfolded = (x.swapaxes(1, 2).reshape(like.shape) for x, like in pairs)
    return *unfolded, None if unfold is None else unfold(of_mask)[0]


def _setup(static: Attention, q: jax.Array, k: jax.Array) -> Setup:
    return Setup(
        mesh=cast(Any, None),  # of no axes
        ring=(),
        batch=(),
        heads=(),
        queries=Positions(q.shape[-2], 1),
        keys=Positions(k.shape[-2], 1),
        causal=static.causal,
        scale=static.scale,
        rate=static.rate,
        tile=_TILE.get(static.platform, _ACCELERATOR_TILE),
        mask_rotates=False,
    )


def _fold(mask: Any, q: jax.Array) -> Any:
    if mask is None or isinstance(mask, TiledMask):
        return mask
    return fold_mask(mask, q.shape)


def _extras(mask: Any, key_data: Any, indices: Any) -> Extras:
    if key_data is None:
        return Extras(mask)
    return Extras(mask, key=key_of(key_data), indices=indices)
