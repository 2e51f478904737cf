"""Attention partitioned when it is compiled, by its operands' layouts: in a ring where needed.

For a compiler that decides layouts itself, as under a captured step of torch, where nobody says by
which mesh axes a sequence is split. What each device does:

- if queries and keys are split by the same mesh axes, those are a ring, as in `ring_attention`;
- if they are split by different ones, or only one of them is, each device attends with its queries
  to its keys, and what was found is put together by an all-reduce of results, not of scores;
- if neither is, the attention of whole sequences (`isoshard.core.nn.dot_product_attention`).

Dropout drops the same weights wherever they are computed (`dropout.keep`).

Under a causal mask queries and keys of a ring are brought in zigzag order and the result back,
where twice the devices divide both lengths and the mask has no rows.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> x = shard(jax.random.normal(jax.random.key(0), (1, 2, 64, 8)), make_mesh((4,), ("x",)),
...           (None, None, "x"))
>>> attend = Attention(False, 1.0)
>>> text = jax.jit(lambda x: attend(x, x, x)[0]).lower(x).compile().as_text()
>>> "collective-permute" in text, "all-gather" in text
(True, False)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.custom_partitioning import Rule, partitioned
from isoshard.core.nn.dot_product_attention import attend, gradients, products, summed_to

from .attention_axes import place
from .dropout import gains
from .local_attention import LocalAttention


@dataclasses.dataclass(frozen=True)
class Attention:
    """The static arguments of an attention, as the compiler gets them.

    Attributes:
        causal: a query sees the keys up to its own position.
        scale: of the scores.
        tile: queries and keys, at most, whose scores exist at once where a sequence is split.
        rate: the share of weights that is dropped, at least 0 and below 1.
    """

    causal: bool
    scale: float
    tile: int = 512
    rate: float = 0.0

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: jax.Array | None = None,
        words: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attend.

        Args:
            q: (.., heads, queries, width).
            k: (.., key heads, keys, width); `heads` is a multiple of `key heads`.
            v: (.., key heads, keys, width of values).
            mask: broadcasts to (.., heads, queries, keys); of bool, True is visible; of floats, it
                is added to the scores.
            words: uint32[2], the key of dropout (`dropout.words_of`); None if nothing is dropped.

        Returns:
            (.., heads, queries, width of values), of the dtype of `q`, and (.., heads, queries),
            the logarithms of the sums of exponentials, in at least float32.
        """
        return _attend(self, q, k, v, mask, words)

    def gradients(
        self,
        dout: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: jax.Array | None,
        log: jax.Array,
        delta: jax.Array,
        wants_mask: bool = False,
        words: jax.Array | None = None,
    ) -> tuple[jax.Array | None, ...]:
        """The gradients of q, k, v, and of a mask that is added if it is wanted.

        Args:
            dout: gradient of the result.
            q: what the result was computed from; so are the next three.
            k: likewise.
            v: likewise.
            mask: likewise.
            log: what came with the result.
            delta: (.., heads, queries), `products(out, dout)`.
            wants_mask: whether the gradient of the mask is computed.
            words: the key of dropout that the result was computed with.

        Returns:
            Four gradients, of the dtypes of q, k, v and the mask; None for one that is not wanted.
        """
        call = _slopes if wants_mask else _gradients
        found = call(self, dout, q, k, v, mask, log, delta, words)
        return tuple(found) if wants_mask else (*found, None)

    def whole(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: jax.Array | None = None,
        words: jax.Array | None = None,
        numbers: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """What a call gives, of sequences that are whole; with the numbers that `gains` takes."""
        options = self._options(q, k, words, numbers)
        out, log = attend(q, k, v, mask, **options)
        return out.astype(q.dtype), log

    def whole_gradients(
        self,
        dout: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: jax.Array | None,
        delta: jax.Array | None = None,
        wants_mask: bool = False,
        words: jax.Array | None = None,
        numbers: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array | None, ...]:
        """What `gradients` gives, likewise; in at least float32, `delta` computed if not given."""
        options = self._options(q, k, words, numbers)
        *found, slopes = gradients(dout, q, k, v, mask, delta=delta, **options)
        return *found, summed_to(slopes, mask.shape) if wants_mask and mask is not None else None

    def _options(self, q: Any, k: Any, words: Any, numbers: Any) -> dict[str, Any]:
        each = gains(words, self.rate, (*q.shape[:-1], k.shape[-2]), numbers)
        return {"scale": self.scale, "causal": self.causal, "gains": each}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Attention, q, k, v, mask, words):
    return _results(static, q, k, v, mask, words)


def _attend_forward(static: Attention, q, k, v, mask, words):
    out, log = _results(static, q, k, v, mask, words)
    return (out, log), (q, k, v, mask, words, out, log)


def _attend_backward(static: Attention, saved, slopes):
    q, k, v, mask, words, out, log = saved
    dout, dlog = slopes
    delta = products(out, dout) - dlog  # a weight is the slope of the logarithm of its row
    added = mask is not None and jnp.issubdtype(mask.dtype, jnp.floating)
    return *static.gradients(dout, q, k, v, mask, log, delta, added, words), None


_attend.defvjp(_attend_forward, _attend_backward)


def _whole(static: Attention, q, k, v, mask, words):
    return static.whole(q, k, v, mask, words)


def _whole_gradients(static: Attention, dout, q, k, v, mask, log, delta, words, of_mask=False):
    found = static.whole_gradients(dout, q, k, v, mask, delta, of_mask, words)
    pairs = zip(found, (q, k, v, mask), strict=True)
    return tuple(x.astype(like.dtype) for x, like in pairs if x is not None)


def _whole_slopes(static: Attention, *operands):
    return _whole_gradients(static, *operands, of_mask=True)


def _split(static: Attention, mesh: Mesh, operands, results):
    q, k, v, mask, words = operands
    part = LocalAttention(static, mesh, place(mesh, (q, *results), (k, v)), *_sizes(q, k, mask))
    rows, columns, of_mask, one = part.layouts
    alone = _alone(mesh, words)
    return mesh, part.forward, (rows, one), (rows, columns, columns, of_mask, alone)


def _split_slopes(static: Attention, mesh: Mesh, operands, results):
    dout, q, k, v, mask, log, _, words = operands
    dq, dk, dv, *dmask = results
    places = place(mesh, (q, dout, dq, log), (k, v, dk, dv))
    part = LocalAttention(static, mesh, places, *_sizes(q, k, mask), bool(dmask))
    rows, columns, of_mask, one = part.layouts
    out = (rows, columns, columns, of_mask)[: len(results)]
    need = (rows, rows, columns, columns, of_mask, one, one, _alone(mesh, words))
    return mesh, part.backward, out, need


def _alone(mesh: Mesh, words):
    return None if words is None else NamedSharding(mesh, P())


def _sizes(q, k, mask):
    of_mask = None if mask is None else tuple(mask.shape)
    return q.shape[-2], k.shape[-2], of_mask, tuple(q.shape[:-3])


def _rule(static: Attention, shapes: tuple[tuple[int, ...], ...]) -> Rule:
    """`b h l d, b h s d, b h s e -> b h l e, b h l`, with as many axes as there are."""
    (queries, keys, _, *mask), words = _without_words(static, shapes)
    given = _Letters(queries, keys)
    operands = [given.rows("d"), given.columns("d"), given.columns("e"), *map(given.mask, mask)]
    operands += words
    return f"{', '.join(operands)} -> {given.rows('e')}, {given.rows()}", given.sizes


def _slopes_rule(static: Attention, shapes: tuple[tuple[int, ...], ...], of_mask=False) -> Rule:
    (_, queries, keys, _, *mask, _, _), words = _without_words(static, shapes)
    given = _Letters(queries, keys)
    masks = list(map(given.mask, mask))
    operands = [given.rows("e"), given.rows("d"), given.columns("d"), given.columns("e"), *masks]
    results = [given.rows("d"), given.columns("d"), given.columns("e"), *(masks * of_mask)]
    return (
        f"{', '.join([*operands, given.rows(), given.rows(), *words])} -> {', '.join(results)}",
        given.sizes,
    )


def _without_words(static: Attention, shapes: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[str]]:
    """The shapes before the key of dropout, which comes last, and the name of its axis."""
    return (shapes[:-1], ["words"]) if static.rate else (shapes, [])


class _Letters:
    """Names for the axes of an attention's operands, equal where they are split alike."""

    def __init__(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
        self.lead = [f"b{axis}" for axis in range(len(queries) - 3)]
        self.heads, self.key_heads = [["h"] if len(queries) > 2 else []] * 2
        self.sizes: dict[str, int] = {}
        for heads, few in zip(queries[-3:-2], keys[-3:-2], strict=True):
            if few == 1 < heads:
                self.key_heads = ["shared"]
            elif few < heads:
                self.heads, self.sizes = ["(h g)"], {"g": heads // few}

    def rows(self, width: str = "") -> str:
        return " ".join([*self.lead, *self.heads, "l", *width])

    def columns(self, width: str) -> str:
        return " ".join([*self.lead, *self.key_heads, "s", width])

    def mask(self, shape: tuple[int, ...]) -> str:
        names = [*self.lead, *self.heads, "l", "s"][-len(shape) :]
        named = zip(names, shape, strict=True)
        return " ".join(f"one{n}" if m == 1 else name for n, (name, m) in enumerate(named))


_results = partitioned(_whole, _split, _rule)
_gradients = partitioned(_whole_gradients, _split_slopes, _slopes_rule)
_slopes = partitioned(_whole_slopes, _split_slopes, functools.partial(_slopes_rule, of_mask=True))
