"""Splits: one axis in blocks of one size, of which only the first elements are valid.

>>> split = AxisSplit((5, 2, 7, 4), 7)
>>> split.extent, split.padded                           # 18 elements in 4 blocks of 7
(18, 28)
>>> split.positions()[:8].tolist()                          # positions of the elements
[0, 1, 2, 3, 4, 7, 8, 14]

Packing scatters the elements of an unsplit axis to their positions; unpacking gathers them. Where
only the end is padded, as `torch.chunk` does, that is `lax.pad` and `lax.slice`. Neither reads
padding, and neither do their gradients: each is the transpose of the other. An unsplit axis is
replicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class AxisSplit:
    """The blocks of an axis.

    Attributes:
        sizes: the valid elements of each block.
        block: elements of a block, valid or not.
        names: the mesh axes that split it, outermost first; none if it is padded only.
        mesh: the mesh they belong to, or None.
    """

    sizes: tuple[int, ...]
    block: int
    names: tuple[str, ...] = ()
    mesh: Mesh | None = None

    @property
    def extent(self) -> int:
        """The number of valid elements."""
        return sum(self.sizes)

    @property
    def padded(self) -> int:
        """The number of elements with padding."""
        return self.block * len(self.sizes)

    @property
    def ends(self) -> bool:
        """Whether the valid elements are the first ones: only the end is padded."""
        full, rest = divmod(self.extent, self.block) if self.block else (0, 0)
        like = [self.block] * full + [rest] * (rest > 0)
        return self.sizes == (*like, *[0] * (len(self.sizes) - len(like)))

    def valid(self) -> np.ndarray:
        """Which positions are valid, as booleans."""
        return (np.arange(self.block) < np.array(self.sizes)[:, None]).reshape(-1)

    def positions(self) -> np.ndarray:
        """The position of each element."""
        return np.flatnonzero(self.valid())


def valid_mask(
    splits: Sequence[AxisSplit | None], axes: Sequence[int] | None = None
) -> Array | None:
    """Which elements of a padded array are valid.

    Returns:
        Booleans that broadcast to the padded shape; None if every element is valid.
    """
    mask = None
    for axis, split in enumerate(splits):
        if split is None or (axes is not None and axis not in axes):
            continue
        if split.extent == split.padded:
            continue
        line = jnp.arange(split.block) < jnp.asarray(split.sizes)[:, None]
        line = line.reshape((1,) * axis + (-1,) + (1,) * (len(splits) - axis - 1))
        mask = line if mask is None else mask & line
    return mask


def pack_axis(x: Array, axis: int, split: AxisSplit) -> Array:
    """Scatter the elements of an unsplit axis to their positions, zeros between them."""
    x = _undivided(x, axis, split)
    if split.extent == split.padded:
        return x
    if split.ends:
        widths = [(0, 0, 0)] * x.ndim
        widths[axis] = (0, split.padded - split.extent, 0)
        return lax.pad(x, jnp.zeros((), x.dtype), widths)
    indices = np.maximum(np.cumsum(split.valid()) - 1, 0)
    moved = _undivided(_take(x, indices, axis), axis, split)
    splits = [split if at == axis else None for at in range(x.ndim)]
    mask = valid_mask(splits)
    return moved if mask is None else jnp.where(mask, moved, jnp.zeros((), x.dtype))


def unpack_axis(x: Array, axis: int, split: AxisSplit) -> Array:
    """Gather the elements of an axis from their positions."""
    if split.ends:
        return _undivided(lax.slice_in_dim(x, 0, split.extent, axis=axis), axis, split)
    return _undivided(_take(_undivided(x, axis, split), split.positions(), axis), axis, split)


def constrain(x: Array, splits: Sequence[AxisSplit | None]) -> Array:
    """Constrain a padded array to its blocks; other axes are left to the compiler."""
    meshes = [split.mesh for split in splits if split is not None and split.mesh and split.names]
    if not meshes:
        return x
    entries = [split.names if split and split.names else P.UNCONSTRAINED for split in splits]
    return lax.with_sharding_constraint(x, NamedSharding(meshes[0], P(*entries)))


def _undivided(x: Array, axis: int, split: AxisSplit) -> Array:
    """Constrain an axis to be replicated.

    It would divide the axis too, but its partitioner is not to be relied on there. With jax 0.10.2
    on CPU the gradient of a maximum over windows is wrong (18 rows over 2 or 4 devices), and that
    of a sort of 18 rows over 4 aborts the process. Rows taken from a divided axis, or put there, it
    sums over all devices, which sends twice what gathering the axis does.
    """
    if split.mesh is None or not split.names:
        return x
    entries = [None if at == axis else P.UNCONSTRAINED for at in range(x.ndim)]
    return lax.with_sharding_constraint(x, NamedSharding(split.mesh, P(*entries)))


def _take(x: Array, indices: np.ndarray, axis: int) -> Array:
    return jnp.take(x, jnp.asarray(indices, np.int32), axis=axis, mode="clip")
