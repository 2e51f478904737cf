"""Shardings of fields: the batch over one axis of the mesh, the first axis of space over the other.

>>> place = Place(iso.make_mesh((2, 4), ("data", "space")))
>>> place.put(np.zeros((4, 1, 16, 6), np.float32)).sharding.spec
P('data', None, 'space')
>>> Place(place.mesh, (6, 2, 5, 3)).put(np.zeros((4, 1, 16, 6), np.float32)).sizes
(None, None, (6, 2, 5, 3), None)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

import isoshard as iso
from isoshard import P

FIELD = P("data", None, "space")
"""Of [batch, channels, *space]: the one spec of both frameworks."""

TOKENS = P("data", "space")
"""Of [batch, tokens, width]."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A mesh, and the sizes of its shards of space.

    Attributes:
        mesh: with the axes "data" and "space".
        sizes: rows of each shard along the first axis of space; None for equal ones.
    """

    mesh: jax.sharding.Mesh
    sizes: tuple[int, ...] | None = None

    def put(self, field: Any) -> Any:
        """Shard a batch of fields.

        Args:
            field: [batch, channels, *space], a NumPy array or a torch tensor.

        Returns:
            A `jax.Array`, an `iso.UnevenArray`, or an `XLAShardedTensor`.
        """
        if self.sizes is None:
            return iso.shard(field, self.mesh, FIELD)
        sizes = (None, None, self.sizes, *(None,) * (field.ndim - 3))
        return iso.shard(field, self.mesh, FIELD, uneven="pad", sizes=sizes)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.mesh.size


def gathered(field: Any) -> np.ndarray:
    """All of a JAX array in blocks of any sizes."""
    return np.asarray(iso.full(field))
