"""What the mask of an attention was made of, for the lowering that computes it tile by tile.

The engine has the operations before an attention; in `origins` it passes a function that returns
the program of a mask. Without it, and for masks of few elements, a mask is an array.

>>> import jax.numpy as jnp
>>> q = jnp.ones((1, 1, 4, 8))
>>> mask = jnp.tril(jnp.ones((4, 4), bool))
>>> tiled_mask_of(mask, q, q) is mask
True
>>> program = jax.make_jaxpr(lambda: jnp.arange(4) <= jnp.arange(4)[:, None])()
>>> with origins(lambda array: (program, [])):
...     tiled = tiled_mask_of(mask, q, q)
>>> tiled.shape, bool((tiled.dense()[0, 0] == mask).all())
((1, 1, 4, 4), True)
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from isoshard.core.nn.tiled_mask import RANK, TiledMask, tiled_mask

Origin = tuple[Any, Sequence[Any]]
"""The closed jaxpr of a mask, and its arguments."""

_ORIGIN_OF: contextvars.ContextVar[Callable[[Any], Origin | None] | None] = contextvars.ContextVar(
    "origin_of", default=None
)


@contextlib.contextmanager
def origins(origin_of: Callable[[Any], Origin | None]) -> Iterator[None]:
    """Context in which the programs of masks are available.

    Args:
        origin_of: returns the program of an array; None where it has none.
    """
    token = _ORIGIN_OF.set(origin_of)
    try:
        yield
    finally:
        _ORIGIN_OF.reset(token)


def tiled_mask_of(
    mask: jax.Array | None, q: jax.Array, k: jax.Array
) -> jax.Array | TiledMask | None:
    """The mask as a function of what it was made of, if that is known and smaller.

    Args:
        mask: broadcasts to (.., heads, queries, keys), or None.
        q: (.., heads, queries, width).
        k: (.., key heads, keys, width).
    """
    origin_of, sides = _ORIGIN_OF.get(), (q.shape[-2], k.shape[-2])
    if mask is None or origin_of is None or q.ndim != RANK or mask.shape[-2:] != sides:
        return mask
    origin = origin_of(mask)
    if origin is None:
        return mask
    tiled = tiled_mask(*origin)
    return tiled if tiled.function.steps else mask
