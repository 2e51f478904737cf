"""Rows: over which mesh axes the rows of an array are split, and how many each shard has.

Where an array does not tell it (`isoshard.core.domain.blocks.known_shardings`), it has to be given.

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

from isoshard.core.domain.blocks.known_shardings import (
    block_sizes,
    known_sharding_of,
    lies,
    sharding_of,
)
from isoshard.core.domain.blocks.ring import permute_blocks
from isoshard.core.layout.axis_types import same_grid
from isoshard.core.layout.mesh import describe_mesh
from isoshard.core.layout.spec import axis_names
from isoshard.core.layout.spec_entries import canonical_spec, entries_of
from isoshard.core.layout.uneven import UnevenArray, padded_of


@dataclasses.dataclass(frozen=True)
class RowSplit:
    """The split of the first axis of an array.

    Attributes:
        mesh: where.
        axes: mesh axes that split the rows, outermost first; none of size 1.
        sizes: valid rows in each block.
        uneven: whether the array is an UnevenArray, so that results are padded alike.
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
        """The layout of an array with these rows, whole along its other axes."""
        return P(self.axes or None)

    def starts(self) -> np.ndarray:
        """The number of the first row of each block."""
        return np.cumsum(self.sizes) - np.array(self.sizes)

    def permute(self, x: Any, pairs: Sequence[tuple[int, int]]) -> Any:
        """Send between devices inside `jax.shard_map`, by the numbers of their blocks.

        Args:
            x: what each device has.
            pairs: (from, to), numbers of blocks.

        Returns:
            What was sent here, or zeros.
        """
        return permute_blocks(x, self.mesh, self.axes, pairs)

    def like(self, array: Any, beside: Any = None) -> Any:
        """A padded result in the form of the array that was read: an UnevenArray if that was.

        Args:
            array: the result.
            beside: an array that gives the layout of the other axes; None if they are whole.

        Returns:
            The result.
        """
        layout = self.layout(array.ndim, beside)
        if not self.uneven:
            return lies(array, layout)
        shape = (self.count, *array.shape[1:])
        sizes = (self.sizes, *[None] * (array.ndim - 1))
        return UnevenArray(array, shape, sizes, layout)

    def layout(self, rank: int, beside: Any = None) -> NamedSharding:
        """The layout of an array with these rows; as for `like`."""
        told = None if beside is None else sharding_of(beside)
        others: tuple[Any, ...] = ()
        if isinstance(told, NamedSharding) and same_grid(told.mesh, self.mesh):
            others = entries_of(told.spec)[1:rank]
        return NamedSharding(self.mesh, P(self.axes or None, *others))


def read_rows(name: str, value: Any, mesh: Any, told: Any, faults: list[str]) -> RowSplit:
    """Find the split of the rows of an array.

    Args:
        name: of the array, for messages.
        value: a jax.Array or UnevenArray, traced or not.
        mesh: the mesh that it has to be on.
        told: the mesh axes that split its rows as said by the user: a spec for one axis, or None.
        faults: is given what is wrong.

    Returns:
        The rows; of no use if there was a fault.

    Raises:
        SpecError: `told` names no axes of the mesh.
    """
    axes = _axes(name, value, mesh, told, faults)
    blocks = math.prod(mesh.shape[axis] for axis in axes)
    uneven = isinstance(value, UnevenArray)
    extent = padded_of(value).shape[0] if value.ndim else 0
    sizes = value.sizes[0] if uneven and value.ndim else None
    sizes = block_sizes(f"axis 0 of {name}", extent, blocks, sizes, faults)
    return RowSplit(mesh, axes, sizes, uneven)


def entries(value: Any) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that split each axis of an array over a mesh; none of size 1."""
    layout = sharding_of(value)
    mesh = layout.mesh
    spec = canonical_spec(P(*entries_of(layout.spec)), mesh, value.ndim, "array")
    found = [_larger(axis_names(entry), mesh) for entry in spec]
    return (*found, *[()] * (value.ndim - len(found)))


def _axes(name: str, value: Any, mesh: Mesh, told: Any, faults: list[str]) -> tuple[str, ...]:
    said = None
    if told is not None:
        spec = canonical_spec(told, mesh, 1, name)
        said = _larger(axis_names(spec[0]) if len(spec) else (), mesh)
    layout = known_sharding_of(value)
    if layout is None:
        if said is None:
            faults.append(f"{name} are traced, and axes= does not say which mesh axes split them")
        return said or ()
    if isinstance(layout, SingleDeviceSharding) and set(mesh.devices.flat) == layout.device_set:
        return ()
    if not isinstance(layout, NamedSharding) or not same_grid(layout.mesh, mesh):
        faults.append(
            f"{name} lie by {layout}, not on the mesh {describe_mesh(mesh)}: lay them out there, "
            f"iso.shard({name}, mesh, spec)"
        )
        return said or ()
    split = entries(value)[0] if value.ndim else ()
    if said is not None and said != split:
        faults.append(
            f"{name} are split over {split}, and axes= says {said}: leave axes= out, or lay them "
            f"out anew, iso.reshard({name}, {P(said or None)})"
        )
    return split


def _larger(names: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name in names if mesh.shape[name] > 1)
