"""Rows: over which mesh axes the rows of an array are split, and how many each shard has.

Where an array has no sharding (`isoshard.core.blocks.traced_shardings`), the caller passes it.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> faults = []
>>> points = shard(np.zeros((8, 3), np.float32), mesh, P(("y", "x")))
>>> rows = read_rows("points", points, mesh, None, faults)
>>> rows.axes, rows.sizes, faults
(('y', 'x'), (1, 1, 1, 1, 1, 1, 1, 1), [])
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import (
    UnevenArray,
    block_sizes,
    canonical_spec,
    closed_sharding_of,
    describe_mesh,
    entries_of,
    padded_of,
    permute_blocks,
    record_sharding,
    same_grid,
    sharding_of,
)
from isoshard.core.kit import spec_axis_names as axis_names


@dataclasses.dataclass(frozen=True)
class RowSplit:
    """The split of the first axis of an array.

    Attributes:
        mesh: the devices.
        axes: mesh axes that split the rows, outermost first; none of size 1.
        sizes: valid rows in each block.
        uneven: whether the array is an UnevenArray, so that results have the same padding.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    uneven: bool

    @property
    def count(self) -> int:
        """How many rows there are, without padding."""
        return sum(self.sizes)

    @property
    def spec(self) -> P:
        """The sharding of an array with these rows, unsplit along its other axes."""
        return P(self.axes or None)

    def starts(self) -> np.ndarray:
        """The global index of the first row of each block."""
        return np.cumsum(self.sizes) - np.array(self.sizes)

    def permute(self, x: Any, pairs: Sequence[tuple[int, int]]) -> Any:
        """Send between devices inside `jax.shard_map`, by the indices of their blocks.

        Args:
            x: each device's block.
            pairs: (from, to), indices of blocks.
        """
        return permute_blocks(x, self.mesh, self.axes, pairs)

    def like(self, array: Any, other: Any = None) -> Any:
        """A padded result in the form of the array that was read: an UnevenArray if that was."""
        layout = self.layout(array.ndim, other)
        if not self.uneven:
            return record_sharding(array, layout)
        shape = (self.count, *array.shape[1:])
        sizes = (self.sizes, *[None] * (array.ndim - 1))
        return UnevenArray(array, shape, sizes, layout)

    def layout(self, rank: int, other: Any = None) -> NamedSharding:
        """The sharding of an array with these rows; as for `like`."""
        sharding = None if other is None else sharding_of(other)
        others: tuple[Any, ...] = ()
        if isinstance(sharding, NamedSharding) and same_grid(sharding.mesh, self.mesh):
            others = entries_of(sharding.spec)[1:rank]
        return NamedSharding(self.mesh, P(self.axes or None, *others))


def read_rows(name: str, value: Any, mesh: Any, declared: Any, errors: list[str]) -> RowSplit:
    """Find the split of the rows of an array."""
    axes = _axes(name, value, mesh, declared, errors)
    blocks = math.prod(mesh.shape[axis] for axis in axes)
    uneven = isinstance(value, UnevenArray)
    extent = padded_of(value).shape[0] if value.ndim else 0
    sizes = value.sizes[0] if uneven and value.ndim else None
    sizes = block_sizes(f"axis 0 of {name}", extent, blocks, sizes, errors)
    return RowSplit(mesh, axes, sizes, uneven)


def entries(value: Any) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that split each axis of an array over a mesh; none of size 1."""
    layout = sharding_of(value)
    mesh = layout.mesh
    spec = canonical_spec(P(*entries_of(layout.spec)), mesh, value.ndim, "array")
    names = [_nontrivial(axis_names(entry), mesh) for entry in spec]
    return (*names, *[()] * (value.ndim - len(names)))


def _axes(name: str, value: Any, mesh: Mesh, declared: Any, errors: list[str]) -> tuple[str, ...]:
    declared_axes = None
    if declared is not None:
        spec = canonical_spec(declared, mesh, 1, name)
        declared_axes = _nontrivial(axis_names(spec[0]) if len(spec) else (), mesh)
    layout = closed_sharding_of(value)
    if layout is None:
        if declared_axes is None:
            errors.append(
                f"{name} are traced, and axes= does not name the mesh axes that split them"
            )
        return declared_axes or ()
    if isinstance(layout, SingleDeviceSharding) and set(mesh.devices.flat) == layout.device_set:
        return ()
    if not isinstance(layout, NamedSharding) or not same_grid(layout.mesh, mesh):
        errors.append(
            f"{name} are sharded by {layout}, not on the mesh {describe_mesh(mesh)}: move them "
            f"there, iso.shard({name}, mesh, spec)"
        )
        return declared_axes or ()
    split = entries(value)[0] if value.ndim else ()
    if declared_axes is not None and declared_axes != split:
        errors.append(
            f"{name} are split over {split}, and axes= declares {declared_axes}: leave axes= "
            f"out, or iso.reshard({name}, {P(declared_axes or None)})"
        )
    return split


def _nontrivial(names: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name in names if mesh.shape[name] > 1)
