"""Static description of an attention: sharding, order of the sequence, visibility."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .positions import Positions

Axes = tuple[str, ...]


def count(mesh: Mesh, axes: Axes) -> int:
    """The product of the sizes of mesh axes."""
    return math.prod(mesh.shape[name] for name in axes)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The static arguments of a compiled attention.

    Attributes:
        mesh: the devices.
        ring: the mesh axes that split the sequence, outermost first; empty if each device has the
            full sequence of its heads.
        batch: the mesh axes that split the batch.
        heads: the mesh axes that split the heads.
        queries: the position of each query.
        keys: the position of each key.
        causal: a query sees the keys up to its own position.
        scale: of the scores.
        rate: the share of weights that is dropped.
        tile: queries and keys, at most, whose scores exist at once.
        mask_rotates: the columns of the mask are split as their keys, and go where those go.
    """

    mesh: Mesh
    ring: Axes
    batch: Axes
    heads: Axes
    queries: Positions
    keys: Positions
    causal: bool
    scale: float
    rate: float
    tile: int
    mask_rotates: bool

    @property
    def devices(self) -> int:
        """The devices of one ring."""
        return count(self.mesh, self.ring)

    @property
    def manual(self) -> frozenset[str]:
        """The mesh axes whose split is written out here; the rest is left to XLA."""
        return frozenset(self.ring + self.batch + self.heads)

    @property
    def spec(self) -> P:
        """The sharding of queries, keys, values and result, [batch, sequence, heads, width]."""
        return P(self.batch or None, self.ring or None, self.heads or None)

    @property
    def rows(self) -> P:
        """The sharding of one value per row of scores, [batch, heads, sequence]."""
        return P(self.batch or None, self.heads or None, self.ring or None)


class Extras(NamedTuple):
    """Arrays besides queries, keys and values; each may be missing.

    Attributes:
        mask: [batch or 1, heads or 1, queries or 1, keys or 1]; of bool, True is visible; of
            floats, it is added to the scores.
        query_lengths: int32[batch], how many queries of each sample count.
        key_lengths: int32[batch], how many keys of each sample count.
        key: of `jax.random`, typed, for dropout.
        indices: int32[batch] and int32[heads], global indices of a device's samples and heads,
            where the mesh axes of the setup do not determine them.
    """

    mask: Any = None  # a jax.Array or None, and its spec in what `specs` gives; so are the others
    query_lengths: Any = None
    key_lengths: Any = None
    key: Any = None
    indices: Any = None

    @property
    def added(self) -> bool:
        """Whether there is a mask that is added to the scores, and so has a gradient."""
        return self.mask is not None and jnp.issubdtype(self.mask.dtype, jnp.floating)

    def shared(self, setup: Setup) -> Axes:
        """The mesh axes along which devices have the same shard of the mask."""
        named = {
            name
            for entry in self.specs(setup).mask or ()
            for name in ((entry,) if isinstance(entry, str) else entry or ())
        }
        return tuple(sorted(setup.manual - named))

    def specs(self, setup: Setup) -> Extras:
        """The spec of each of them on the mesh; the rows of a mask are split as their queries."""
        mask = None
        if self.mask is not None:
            ring = setup.ring or None
            mask = P(
                (setup.batch or None) if self.mask.shape[0] > 1 else None,
                (setup.heads or None) if self.mask.shape[1] > 1 else None,
                ring if self.mask.shape[2] > 1 else None,
                ring if setup.mask_rotates else None,
            )
        lengths = P(setup.batch or None)
        return Extras(
            mask,
            None if self.query_lengths is None else lengths,
            None if self.key_lengths is None else lengths,
            None if self.key is None else P(),
        )
