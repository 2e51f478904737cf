"""Mesh axes of each axis of an attention, read from shardings that the compiler has chosen.

Operands are (.., heads, length, width), as torch has them; with two axes there are no heads. A
sequence axis may be split by any mesh axes, evenly or not. Widths are replicated. Heads and the
axes before them are split where that gives equal shards.

>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> def like(*shape, spec):
...     return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
>>> q = like(2, 4, 16, 8, spec=("x", None, "y"))
>>> k = like(2, 2, 32, 8, spec=("x", None, "y"))
>>> found = attention_axes(mesh, (q,), (k, k))
>>> found.rows == found.columns == ("y",), found.spec_of("q"), found.spec_of("k")
(True, P('x', None, 'y', None), P('x', None, 'y', None))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import entries_of
from isoshard.core.kit import spec_axis_names as axis_names

from .setup import Axes, count


@dataclasses.dataclass(frozen=True)
class AttentionAxes:
    """The mesh axes that split each axis, outermost first.

    Attributes:
        lead: of the axes before the heads.
        heads: of the heads of the queries; None without heads.
        key_heads: of those of the keys, which may be fewer.
        rows: of the queries.
        columns: of the keys: those of the queries, or others.
    """

    lead: tuple[Axes, ...]
    heads: Axes | None
    key_heads: Axes | None
    rows: Axes
    columns: Axes

    @property
    def is_ring(self) -> bool:
        """Whether keys go round a ring, on which the queries are."""
        return bool(self.rows) and self.rows == self.columns

    def spec_of(self, which: Literal["q", "k", "log"]) -> P:
        """The spec of queries and result, of keys and values, or of one value per query."""
        heads = self.key_heads if which == "k" else self.heads
        sequence = self.columns if which == "k" else self.rows
        axes = [*self.lead, *(() if heads is None else (heads,)), sequence]
        return P(*(name or None for name in axes), *(() if which == "log" else (None,)))

    def spec_of_mask(self, shape: Sequence[int]) -> P:
        """The spec of a mask, which is split as the scores it is for.

        Its columns are split as their keys; but in a ring the rows of a device are not split.
        """
        axes = [*self.lead, *(() if self.heads is None else (self.heads,)), self.rows]
        columns = () if self.is_ring and shape[-2] > 1 else self.columns
        axes = [*axes, columns][-len(shape) :]
        return P(*(name if n > 1 and name else None for name, n in zip(axes, shape, strict=True)))

    def shared(self, shape: Sequence[int]) -> Axes:
        """The mesh axes along which devices have the same shard of a mask."""
        split = {name for entry in self.spec_of_mask(shape) for name in axis_names(entry)}
        every = (*self.lead, self.heads or (), self.rows, self.columns)
        return tuple(sorted({name for axes in every for name in axes} - split))


def attention_axes(mesh: Mesh, queries: Sequence[Any], keys: Sequence[Any]) -> AttentionAxes:
    """Decide how an attention is split, so that as little as possible has to move first."""
    q, k = queries[0], keys[0]
    used: set[str] = set()

    def first(among: Sequence[Any], axis: int) -> Axes:
        names = (_names(mesh, x, axis, used) for x in among)
        return next(filter(None, names), ())

    rank = len(q.shape)  # axes are counted from the left: some have no width
    rows, columns = first(queries, rank - 2), first(keys, rank - 2)
    if set(rows) & set(columns):
        rows = columns = max(rows, columns, key=len)
    used.update(rows, columns)
    heads = key_heads = None
    if rank > 2:
        heads = first((*queries, *keys), rank - 3)
        heads, key_heads = _fit_heads(mesh, heads, q.shape[-3], k.shape[-3])
        used.update(heads)
    lead = []
    for axis in range(rank - 3):
        names = first((*queries, *keys), axis)
        lead.append(names if q.shape[axis] % count(mesh, names) == 0 else ())
        used.update(lead[-1])
    return AttentionAxes(tuple(lead), heads, key_heads, rows, columns)


def spec_of_leaf(mask: P, shape: Sequence[int]) -> P:
    """The spec of a leaf of a mask, with an axis for each of the mask's, of its extent or 1."""
    return P(*(name if n > 1 else None for name, n in zip(mask, shape, strict=True)))


def fold(x: jax.Array) -> jax.Array:
    """(.., heads, length, width) as [batch, length, heads, width]."""
    return x.reshape(-1, heads_of(x), *x.shape[-2:]).swapaxes(1, 2)


def fold_mask(mask: jax.Array, queries: tuple[int, ...]) -> jax.Array:
    """(.., heads, queries, keys) as four axes, each as long as that of the scores, or 1.

    Args:
        mask: broadcasts to the scores.
        queries: their shape, (.., heads, length, width).
    """
    mask = mask.reshape(*(1,) * (max(len(queries), 3) - mask.ndim), *mask.shape)
    if math.prod(mask.shape[:-3]) > 1:
        mask = jnp.broadcast_to(mask, (*queries[:-3], *mask.shape[-3:]))
    return mask.reshape(-1, *mask.shape[-3:])


def heads_of(x: jax.Array) -> int:
    """How many heads (.., heads, length, width) has; 1 without that axis."""
    return x.shape[-3] if x.ndim > 2 else 1


def _names(mesh: Mesh, x: Any, axis: int, used: set[str]) -> Axes:
    """The mesh axes that split an axis of an operand, but those that are used."""
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding):
        return ()
    entries = [*entries_of(sharding.spec), *[None] * len(x.shape)][: len(x.shape)]
    return tuple(
        name for name in axis_names(entries[axis]) if mesh.shape[name] > 1 and name not in used
    )


def _fit_heads(mesh: Mesh, axes: Axes, heads: int, key_heads: int) -> tuple[Axes, Axes]:
    """The axes that split heads in equal shards, each with its key heads."""
    for end in range(len(axes), -1, -1):
        fit = axes[:end]
        if heads % count(mesh, fit):
            continue
        prefixes = (fit[:n] for n in range(end, -1, -1))
        few = next(axes for axes in prefixes if key_heads % count(mesh, axes) == 0)
        if few == fit or key_heads == count(mesh, few):
            return fit, few
    return (), ()
