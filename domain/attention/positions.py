"""Positions of a sequence's elements, for each order in which devices store them.

A sequence of eight over two devices, in order, in zigzag order, and with three and one valid
elements in blocks of four:

>>> Positions(8, 2).positions(np.arange(8)).tolist()
[0, 1, 2, 3, 4, 5, 6, 7]
>>> Positions(8, 2, zigzag=True).positions(jnp.arange(8)).tolist()
[0, 1, 6, 7, 2, 3, 4, 5]
>>> line = Positions(8, 2, sizes=(3, 1))
>>> line.positions(jnp.arange(8)).tolist(), line.valid(jnp.arange(8)).tolist()
([0, 1, 2, 3, 3, 4, 5, 6], [True, True, True, False, True, False, False, False])
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Positions:
    """A sequence in blocks, one per device.

    Attributes:
        length: elements in all blocks together, padding included.
        blocks: how many blocks.
        zigzag: device `i` of `n` has the slices `i` and `2n - 1 - i` of 2n equal ones.
        sizes: valid elements of each block; None for all.
    """

    length: int
    blocks: int
    zigzag: bool = False
    sizes: tuple[int, ...] | None = None

    @property
    def block(self) -> int:
        """Elements per block."""
        return self.length // self.blocks

    def positions(self, indices: jax.Array) -> jax.Array:
        """The positions in the sequence of the elements at `indices` of the array.

        Args:
            indices: int32 of any shape, each in `range(length)`.

        Returns:
            int32 of the same shape. Undefined for padding.
        """
        if self.zigzag:
            half = self.block // 2
            slice_index, within = indices // half, indices % half
            device = slice_index // 2
            back = 2 * self.blocks - 1 - device
            return jnp.where(slice_index % 2 == 0, device, back) * half + within
        if self.sizes is None:
            return indices
        first = np.concatenate([[0], np.cumsum(self.sizes)[:-1]]).astype(np.int32)
        return jnp.asarray(first)[indices // self.block] + indices % self.block

    def valid(self, indices: jax.Array) -> jax.Array:
        """Whether each of `indices` is an element of the sequence, not padding."""
        if self.sizes is None:
            return jnp.ones(indices.shape, bool)
        sizes = np.array(self.sizes, np.int32)
        return indices % self.block < jnp.asarray(sizes)[indices // self.block]
