"""Which scores of a tile count: causal order, lengths, masks, padding and dropout in one place.

All but a mask reduce to two lines of numbers: for each query the last position that it sees, and
for each key its position. A query sees a key if the second is at most the first. A tile in which no
query sees any key is then known from the ends of the lines, and is not computed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.nn.dropout import keep

from .setup import Extras, Setup

_BEYOND = np.int32(2**31 - 1)  # the position of a key that no query sees


class Span(NamedTuple):
    """One side of a tile. The last one overlaps the one before, where sizes do not divide.

    Attributes:
        start: of the tile in the block.
        new: the first element of the tile in the block that is not in the tile before.
        size: elements of the tile.
    """

    start: jax.Array
    new: jax.Array
    size: int

    def cut(self, x: jax.Array, axis: int) -> jax.Array:
        """The tile's slice of a block."""
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.size, axis)

    def put(self, x: jax.Array, part: jax.Array, axis: int) -> jax.Array:
        """The block with the tile's slice replaced."""
        return jax.lax.dynamic_update_slice_in_dim(x, part, self.start, axis)

    def add(self, x: jax.Array, part: jax.Array, axis: int) -> jax.Array:
        """The block with the tile's slice added to."""
        return self.put(x, self.cut(x, axis) + part, axis)


_SMALL = 64  # a tile of so many queries and keys is not made smaller


def tile_of(length: int, most: int) -> int:
    """The size of a tile along a block: `most`, but so that its scores are few beside the block's.

    A tile takes about a dozen arrays of its scores. With a quarter of a block on each side they are
    fewer than the scores of one block of queries with one of keys, of which attention that is not
    tiled has one for each device.

    >>> [tile_of(length, 512) for length in (20, 128, 300, 1024, 8192)]
    [20, 64, 75, 256, 512]
    """
    size = min(length, most, max(_SMALL, length // 4))
    number = -(-length // size)
    return length // number if length % number == 0 else size


def spans(length: int, tile: int) -> tuple[int, int]:
    """How many tiles a block of `length` has, and their size; `tile` is the most."""
    size = tile_of(length, tile)
    return -(-length // size), size


def span(number: jax.Array, length: int, tile: int) -> Span:
    """The tile of that number in a block of `length`."""
    size = tile_of(length, tile)
    return Span(jnp.minimum(number * size, length - size), number * size, size)


class Visibility:
    """What the queries of one block see of the keys of another.

    Args:
        setup: the attention.
        extras: its masks, as this device has them.
        shape: (batch, key heads, query heads per key head), on this device.
        blocks: which block of queries and which of keys, counted along the ring.
        sizes: elements in a block of queries and one of keys.
    """

    def __init__(
        self,
        setup: Setup,
        extras: Extras,
        shape: tuple[int, int, int],
        blocks: tuple[jax.Array | int, jax.Array | int],
        sizes: tuple[int, int],
    ) -> None:
        """Find the first places of both blocks in their sequences."""
        self.setup, self.extras, self.shape, self.sizes = setup, extras, shape, sizes
        self.first = tuple(b * size for b, size in zip(blocks, sizes, strict=True))
        self.lined = (
            setup.causal
            or extras.query_lengths is not None
            or extras.key_lengths is not None
            or any(line.sizes is not None for line in (setup.queries, setup.keys))
            or any(size % tile_of(size, setup.tile) for size in sizes)
        )

    def lines(self, rows: Span, columns: Span) -> tuple[jax.Array, jax.Array] | None:
        """The last position each query sees, int32[batch or 1, q], and the keys', int32[k]."""
        if not self.lined:
            return None
        setup, (queries, keys) = self.setup, self._places(rows, columns)
        position = setup.queries.positions(queries)
        last = position if setup.causal else jnp.full_like(position, _BEYOND - 1)
        inside = (rows.start + jnp.arange(rows.size) >= rows.new) & setup.queries.valid(queries)
        last = jnp.where(inside, last, -1)[None]
        if self.extras.query_lengths is not None:
            last = jnp.where(position < self.extras.query_lengths[:, None], last, -1)
        if self.extras.key_lengths is not None:
            last = jnp.minimum(last, self.extras.key_lengths[:, None] - 1)
        inside = (columns.start + jnp.arange(columns.size) >= columns.new) & setup.keys.valid(keys)
        return last, jnp.where(inside, setup.keys.positions(keys), _BEYOND)

    def allowed(
        self, rows: Span, columns: Span, lines: tuple[jax.Array, jax.Array] | None
    ) -> jax.Array | None:
        """Which scores count: bool, broadcasts to [batch, key heads, group, q, k]; None for all."""
        allowed = None
        if lines is not None:
            last, position = lines
            allowed = (position <= last[..., None])[:, None, None]
        if self.extras.mask is None or self.extras.added:
            return allowed
        mask = self._mask(rows, columns)
        return mask if allowed is None else mask & allowed

    def added(self, rows: Span, columns: Span) -> jax.Array | None:
        """What is added to the scores; broadcasts as `allowed`. None for nothing."""
        return self._mask(rows, columns) if self.extras.added else None

    def put_slopes(
        self, whole: jax.Array, rows: Span, columns: Span, slopes: jax.Array
    ) -> jax.Array:
        """Add the gradients of a tile's scores to those of the mask."""
        batch, heads, group, queries, keys = slopes.shape
        parts = slopes.reshape(batch, heads * group, queries, keys)
        over = [axis for axis, extent in enumerate(whole.shape) if extent == 1]
        parts = parts.sum(over, keepdims=True) if over else parts
        first = (0, 0, rows.start if whole.shape[2] > 1 else 0, self._column(whole, columns))
        corner = [jnp.asarray(n, jnp.int32) for n in first]
        before = jax.lax.dynamic_slice(whole, corner, parts.shape)
        return jax.lax.dynamic_update_slice(whole, before + parts, corner)

    def _mask(self, rows: Span, columns: Span) -> jax.Array:
        """The tile's slice of the mask, with an axis for the groups of heads."""
        mask = self.extras.mask
        if mask.shape[2] > 1:
            mask = rows.cut(mask, 2)
        if mask.shape[3] > 1:
            first = self._column(mask, columns)
            mask = jax.lax.dynamic_slice_in_dim(mask, first, columns.size, 3)
        _, heads, group = self.shape
        split = (heads, group) if mask.shape[1] > 1 else (1, 1)
        return mask.reshape(mask.shape[0], *split, *mask.shape[2:])

    def _column(self, mask: jax.Array, columns: Span) -> jax.Array | int:
        """The first column of the mask that belongs to the tile."""
        if mask.shape[3] == 1:
            return 0
        return columns.start if self.setup.riding else self.first[1] + columns.start

    def kept(self, rows: Span, columns: Span) -> jax.Array | None:
        """Which weights dropout keeps: bool[batch, key heads, group, q, k]; None without it."""
        setup, key = self.setup, self.extras.key
        if key is None:
            return None
        queries, keys = self._places(rows, columns)
        batch, heads, group = self.shape
        samples, each = self.extras.numbers or (
            _numbers(setup.batch, batch),
            _numbers(setup.heads, heads * group),
        )
        kept = keep(
            key,
            setup.rate,
            samples,
            each,
            setup.queries.positions(queries),
            setup.keys.positions(keys),
        )
        return kept.reshape(batch, heads, group, rows.size, columns.size)

    def _places(self, rows: Span, columns: Span) -> tuple[jax.Array, jax.Array]:
        queries = self.first[0] + rows.start + jnp.arange(rows.size)
        return queries, self.first[1] + columns.start + jnp.arange(columns.size)


def _numbers(axes: tuple[str, ...], size: int) -> jax.Array:
    """The numbers, in the whole, of the `size` that this device has."""
    first = jax.lax.axis_index(axes) * size if axes else 0
    return first + jnp.arange(size)
