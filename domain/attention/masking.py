"""The mask of a tile of scores: causal order, lengths, masks, padding and dropout.

All but a mask reduce to two vectors: for each query the last position that it sees, and
for each key its position. A query sees a key if the second is at most the first. A tile in which no
query sees any key is then known from their extremes, and is not computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.kit import Slice, TiledMask, keep

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

    def slice(self, x: jax.Array, axis: int) -> jax.Array:
        """The tile's slice of a block."""
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.size, axis)

    def put(self, x: jax.Array, update: jax.Array, axis: int) -> jax.Array:
        """The block with the tile's slice replaced."""
        return jax.lax.dynamic_update_slice_in_dim(x, update, self.start, axis)

    def add(self, x: jax.Array, update: jax.Array, axis: int) -> jax.Array:
        """The block with the tile's slice added to."""
        return self.put(x, self.slice(x, axis) + update, axis)


_SMALL = (
    64  # queries and keys of the smallest tile: below it, loop overhead exceeds what a tile saves
)


def tile_of(length: int, most: int) -> int:
    """The size of a tile along a block: at most `most`, with few scores compared to the block's.

    A tile takes about a dozen arrays of its scores. With a quarter of a block on each side they are
    fewer than the scores of one block of queries with one of keys, of which attention that is not
    tiled has one for each device.

    >>> [tile_of(length, 512) for length in (20, 128, 300, 1024, 8192)]
    [20, 64, 75, 256, 512]
    """
    size = min(length, most, max(_SMALL, length // 4))
    tiles = -(-length // size)
    return length // tiles if length % tiles == 0 else size


def spans(length: int, tile: int) -> tuple[int, int]:
    """How many tiles a block of `length` has, and their size; `tile` is the most."""
    size = tile_of(length, tile)
    return -(-length // size), size


def span(index: jax.Array, length: int, tile: int) -> Span:
    """The tile of that index in a block of `length`."""
    size = tile_of(length, tile)
    return Span(jnp.minimum(index * size, length - size), index * size, size)


class Visibility:
    """Visibility of the keys of one block to the queries of another.

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
        """Compute the offsets of both blocks in their sequences."""
        self.setup, self.extras, self.shape, self.sizes = setup, extras, shape, sizes
        self.first = tuple(b * size for b, size in zip(blocks, sizes, strict=True))
        self.has_bounds = (
            setup.causal
            or extras.query_lengths is not None
            or extras.key_lengths is not None
            or any(line.sizes is not None for line in (setup.queries, setup.keys))
            or any(size % tile_of(size, setup.tile) for size in sizes)
        )

    @property
    def has_bool_mask(self) -> bool:
        """Whether a mask hides keys, apart from order and lengths."""
        return self.extras.mask is not None and not self.extras.added

    def bounds(self, rows: Span, columns: Span) -> tuple[jax.Array, jax.Array] | None:
        """The last position each query sees, int32[batch or 1, q], and the keys', int32[k]."""
        if not self.has_bounds:
            return None
        setup, (queries, keys) = self.setup, self._indices(rows, columns)
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
        self, rows: Span, columns: Span, bounds: tuple[jax.Array, jax.Array] | None
    ) -> jax.Array | None:
        """Which scores count: bool, broadcasts to [batch, key heads, group, q, k]; None for all."""
        allowed = None
        if bounds is not None:
            last, position = bounds
            allowed = (position <= last[..., None])[:, None, None]
        if self.extras.mask is None or self.extras.added:
            return allowed
        mask = self._mask(rows, columns)
        return mask if allowed is None else mask & allowed

    def added(self, rows: Span, columns: Span) -> jax.Array | None:
        """What is added to the scores; broadcasts as `allowed`. None for nothing."""
        return self._mask(rows, columns) if self.extras.added else None

    def add_mask_gradient(
        self, gradient: jax.Array, rows: Span, columns: Span, tile_gradient: jax.Array
    ) -> jax.Array:
        """Add the gradients of a tile's scores to those of the mask."""
        batch, heads, group, queries, keys = tile_gradient.shape
        update = tile_gradient.reshape(batch, heads * group, queries, keys)
        over = [axis for axis, extent in enumerate(gradient.shape) if extent == 1]
        update = update.sum(over, keepdims=True) if over else update
        first = (0, 0, rows.start if gradient.shape[2] > 1 else 0, self._column(gradient, columns))
        corner = [jnp.asarray(n, jnp.int32) for n in first]
        before = jax.lax.dynamic_slice(gradient, corner, update.shape)
        return jax.lax.dynamic_update_slice(gradient, before + update, corner)

    def _mask(self, rows: Span, columns: Span) -> jax.Array:
        """The tile's slice of the mask, with an axis for the groups of heads."""
        mask: Any = self.extras.mask  # of arrays or of tiles
        if isinstance(mask, TiledMask):
            mask = mask.tile(
                Slice(rows.start, self.first[0] + rows.start, rows.size),
                Slice(self._column(mask, columns), self.first[1] + columns.start, columns.size),
            )
        else:
            if mask.shape[2] > 1:
                mask = rows.slice(mask, 2)
            if mask.shape[3] > 1:
                first = self._column(mask, columns)
                mask = jax.lax.dynamic_slice_in_dim(mask, first, columns.size, 3)
        _, heads, group = self.shape
        split = (heads, group) if mask.shape[1] > 1 else (1, 1)
        return mask.reshape(mask.shape[0], *split, *mask.shape[2:])

    def _column(self, mask: Any, columns: Span) -> jax.Array | int:
        """The first column of the mask that belongs to the tile."""
        if mask.shape[3] == 1:
            return 0
        return columns.start if self.setup.mask_rotates else self.first[1] + columns.start

    def keep_mask(self, rows: Span, columns: Span) -> jax.Array | None:
        """Which weights dropout keeps: bool[batch, key heads, group, q, k]; None without it."""
        setup, key = self.setup, self.extras.key
        if key is None:
            return None
        queries, keys = self._indices(rows, columns)
        batch, heads, group = self.shape
        samples, each = self.extras.indices or (
            _global_indices(setup.batch, batch),
            _global_indices(setup.heads, heads * group),
        )
        mask = keep(
            key,
            setup.rate,
            samples,
            each,
            setup.queries.positions(queries),
            setup.keys.positions(keys),
        )
        return mask.reshape(batch, heads, group, rows.size, columns.size)

    def _indices(self, rows: Span, columns: Span) -> tuple[jax.Array, jax.Array]:
        queries = self.first[0] + rows.start + jnp.arange(rows.size)
        return queries, self.first[1] + columns.start + jnp.arange(columns.size)


def _global_indices(axes: tuple[str, ...], size: int) -> jax.Array:
    """Global indices of the `size` elements that this device has."""
    first = jax.lax.axis_index(axes) * size if axes else 0
    return first + jnp.arange(size)
