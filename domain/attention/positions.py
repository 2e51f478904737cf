"""Where each element of a sequence stands, whatever the order in which devices hold it.

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
        zigzag: device `i` of `n` holds the slices `i` and `2n - 1 - i` of 2n equal ones.
        sizes: how many elements of each block are valid; None says all.
    """

    length: int
    blocks: int
    zigzag: bool = False
    sizes: tuple[int, ...] | None = None

    @property
    def block(self) -> int:
        """Elements per block."""
        return self.length // self.blocks

    def positions(self, places: jax.Array) -> jax.Array:
        """The position in the sequence of what stands at `places` of the array.

        Args:
            places: int32 of any shape, each in `range(length)`.

        Returns:
            int32 of the same shape. At places that are padding it says nothing.
        """
        if self.zigzag:
            part = self.block // 2
            number, within = places // part, places % part
            device = number // 2
            back = 2 * self.blocks - 1 - device
            return jnp.where(number % 2 == 0, device, back) * part + within
        if self.sizes is None:
            return places
        first = np.concatenate([[0], np.cumsum(self.sizes)[:-1]]).astype(np.int32)
        return jnp.asarray(first)[places // self.block] + places % self.block

    def valid(self, places: jax.Array) -> jax.Array:
        """Which of `places` hold an element of the sequence, and no padding."""
        if self.sizes is None:
            return jnp.ones(places.shape, bool)
        sizes = np.array(self.sizes, np.int32)
        return places % self.block < jnp.asarray(sizes)[places // self.block]
