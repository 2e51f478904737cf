"""Tiles: the intermediate form between all sharding notations.

A sharding assigns blocks of a tensor to devices. `Tiles` is that assignment as an integer array:
`grid[i, j, .., r]` is the device of block `(i, j, ..)`, and `r` counts its replicas.

>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> tiles = Tiles.from_spec(P(None, "x"), mesh, 2)       # second tensor axis split by x
>>> tiles.blocks, tiles.replicas                         # 1 x 2 blocks, 4 devices each
((1, 2), 4)
>>> tiles.grid
array([[[0, 1, 2, 3],
        [4, 5, 6, 7]]])
>>> tiles.to_spec(mesh)
P(None, 'x')
>>> tiles.slices((6, 8))[5]                              # the slice of device 5
(slice(0, 6, None), slice(4, 8, None))

Device numbers are positions in the flattened mesh, never `Device.id`: a sharding saved on eight
TPUs loads on eight CPUs. One that a `PartitionSpec` cannot express (devices in an order that no
mesh axis has) raises `UnrepresentableError`.

Source: GSPMD, arXiv 2105.04663, section 3.1 (tiled, replicated, partially tiled).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError, UnrepresentableError

from .mesh import as_mesh, describe_mesh
from .partial_sums import check_no_sums
from .spec import axis_names, normalize_spec, register_spelling
from .spec_entries import entries_of


class Tiles:
    """The devices of each block of a tensor. Immutable; equal up to the order of replicas.

    Args:
        grid: int array of logical device numbers, shape `(n_0, .., n_{rank-1}, replicas)`: `n_d`
            blocks along tensor axis `d`, and the devices of each block's replicas.
        num_devices: the number of all devices; those that are not in `grid` have no data. By
            default all are in `grid`.

    Raises:
        ShardingError: `grid` has no replica axis, or does not name distinct devices.

    Example:
        >>> Tiles([[0, 1], [1, 2]])
        Traceback (most recent call last):
            ...
        isoshard.core.errors.ShardingError: the grid [[0, 1], [1, 2]] is no layout over 4 devices: device 1 is named 2 times. Name each of 0..3 at most once.
    """  # noqa: E501

    __slots__ = ("_key", "grid", "num_devices")

    grid: np.ndarray
    num_devices: int

    def __init__(self, grid: Any, num_devices: int | None = None) -> None:
        """Check the grid and keep a copy of it."""
        grid = np.array(grid)
        count = grid.size if num_devices is None else int(num_devices)
        _check_grid(grid, count)
        grid = grid.astype(np.int64)
        grid.flags.writeable = False
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "num_devices", count)
        object.__setattr__(self, "_key", (count, grid.shape, np.sort(grid, -1).tobytes()))

    @classmethod
    def from_spec(cls, spec: Any, mesh: Mesh, ndim: int) -> Tiles:
        """The tiles of a spec over a mesh.

        Args:
            spec: any spelling that `normalize_spec` takes.
            mesh: the mesh.
            ndim: rank of the tensor; axes past the spec's entries are not split.

        Returns:
            The tiles over `mesh.size` devices.

        Raises:
            SpecError: the spec does not fit.
        """
        mesh = as_mesh(mesh, abstract=True)
        return cls._of_canonical(normalize_spec(spec, mesh, ndim), mesh, ndim)

    @classmethod
    def from_sharding(cls, sharding: Sharding, ndim: int) -> Tiles:
        """The tiles of a JAX sharding.

        Args:
            sharding: a NamedSharding, or the sharding of an array on one device.
            ndim: rank of the tensor.

        Returns:
            The tiles over the sharding's own mesh.

        Raises:
            UnrepresentableError: another kind of sharding, which has no mesh to number devices by;
                or there are unreduced axes.

        Example:
            >>> from isoshard.core.layout.mesh import make_mesh
            >>> sharding = NamedSharding(make_mesh((2, 4), ("x", "y")), P("y"))
            >>> Tiles.from_sharding(sharding, 1).grid.tolist()
            [[0, 4], [1, 5], [2, 6], [3, 7]]
        """
        if isinstance(sharding, NamedSharding):
            check_no_sums(sharding, "tiles have no terms")
            return cls._of_canonical(sharding.spec, sharding.mesh, ndim)
        if isinstance(sharding, SingleDeviceSharding):
            return cls.replicated(ndim, 1)
        raise UnrepresentableError(
            f"a {type(sharding).__name__} has no mesh to number its devices by; shard the array "
            "with iso.reshard(x, mesh, spec) first"
        )

    @classmethod
    def replicated(cls, ndim: int, num_devices: int) -> Tiles:
        """The tiles of a tensor that is replicated on every device."""
        return cls(np.arange(num_devices).reshape((1,) * ndim + (num_devices,)))

    @classmethod
    def _of_canonical(cls, spec: P, mesh: Any, ndim: int) -> Tiles:
        entries = [axis_names(entry) for entry in entries_of(spec)] + [()] * (ndim - len(spec))
        used = [name for names in entries for name in names]
        spare = [name for name in mesh.axis_names if name not in used]
        order = [mesh.axis_names.index(name) for name in used + spare]
        blocks = [math.prod(mesh.shape[name] for name in names) for names in entries]
        devices = np.arange(mesh.size).reshape(*mesh.shape.values())
        replicas = math.prod(mesh.shape[name] for name in spare)
        return cls(devices.transpose(order).reshape(*blocks, replicas))

    @property
    def ndim(self) -> int:
        """Rank of the tensor."""
        return self.grid.ndim - 1

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of blocks along each tensor axis."""
        return self.grid.shape[:-1]

    @property
    def replicas(self) -> int:
        """Number of devices with each block."""
        return self.grid.shape[-1]

    def block_of(self) -> dict[int, tuple[int, ...]]:
        """The block of each device, by device number."""
        return {
            int(device): block
            for block in np.ndindex(*self.blocks)
            for device in self.grid[block].tolist()
        }

    def slices(self, shape: Sequence[int]) -> dict[int, tuple[slice, ...]]:
        """The slice of a tensor on each device.

        Args:
            shape: global shape of the tensor; each axis a multiple of its number of blocks.

        Returns:
            One tuple of slices per device number.

        Raises:
            ShardingError: the shape has another rank, or does not split evenly.
        """
        if len(shape) != self.ndim or any(
            size % count for size, count in zip(shape, self.blocks, strict=True)
        ):
            raise ShardingError(
                f"a tensor of shape {tuple(shape)} does not split into {self.blocks} equal blocks; "
                "pad it, or split another axis"
            )
        sizes = [size // count for size, count in zip(shape, self.blocks, strict=True)]
        return {
            device: tuple(
                slice(at * size, (at + 1) * size) for at, size in zip(block, sizes, strict=True)
            )
            for device, block in self.block_of().items()
        }

    def to_spec(self, mesh: Mesh) -> P:
        """The spec of these tiles over a mesh.

        No search is needed: one step along a mesh axis shows which tensor axis it splits and its
        stride there; the spec is rebuilt from those and compared.

        Args:
            mesh: of `num_devices` devices.

        Returns:
            The canonical spec; mesh axes of size 1 do not appear.

        Raises:
            UnrepresentableError: no spec over this mesh has these tiles.

        Example:
            >>> from isoshard.core.layout.mesh import make_mesh
            >>> Tiles([[0], [3], [1], [2]]).to_spec(make_mesh((4,), ("x",)))
            Traceback (most recent call last):
                ...
            isoshard.core.errors.UnrepresentableError: blocks (4,) on devices [0, 3, 1, 2] follow no order of the mesh axes 'x' (4); reorder the mesh's devices, or reshard first
        """  # noqa: E501
        mesh = as_mesh(mesh, abstract=True)
        if self.grid.size == self.num_devices == mesh.size:
            spec = self._guess_spec(mesh)
            if spec is not None and Tiles._of_canonical(spec, mesh, self.ndim) == self:
                return spec
        on = "" if self.num_devices == mesh.size else f" of {self.num_devices}"
        raise UnrepresentableError(
            f"blocks {self.blocks} on devices {self.grid.ravel().tolist()}{on} follow no order of "
            f"the mesh axes {describe_mesh(mesh)}; reorder the mesh's devices, or reshard first"
        )

    def _guess_spec(self, mesh: Mesh) -> P | None:
        """The only possible spec, or None if a mesh axis would split two tensor axes."""
        block_of = np.empty((self.grid.size, self.ndim), np.int64)
        for device, block in self.block_of().items():
            block_of[device] = block
        block_of = block_of.reshape(*mesh.shape.values(), self.ndim)
        steps: list[list[tuple[int, str]]] = [[] for _ in self.blocks]
        for axis, name in enumerate(mesh.axis_names):
            if mesh.shape[name] == 1:
                continue
            # One step along a mesh axis moves at most one tensor axis, by a constant stride.
            stride = block_of[(0,) * axis + (1,) + (0,) * (len(mesh.axis_names) - axis - 1)]
            moved = np.flatnonzero(stride)
            if len(moved) > 1:
                return None
            for dim in moved:
                steps[dim].append((int(stride[dim]), name))
        entries = [tuple(name for _, name in sorted(moves, reverse=True)) for moves in steps]
        while entries and not entries[-1]:
            entries.pop()
        return P(*(names[0] if len(names) == 1 else names or None for names in entries))

    def __setattr__(self, name: str, value: object) -> None:
        """Raise: tiles are immutable."""
        raise AttributeError(f"Tiles are immutable; create new ones to change {name}")

    def __eq__(self, other: object) -> bool:
        """Whether every device has the same block of the same grid."""
        return self._key == other._key if isinstance(other, Tiles) else NotImplemented

    def __hash__(self) -> int:
        """Equal for equal layouts."""
        return hash(self._key)

    def __repr__(self) -> str:
        """The constructor's call."""
        spare = "" if self.grid.size == self.num_devices else f", num_devices={self.num_devices}"
        return f"Tiles({self.grid.tolist()}{spare})"


def _check_grid(grid: np.ndarray, count: int) -> None:
    """Raise one error with all faults of a grid."""
    if grid.ndim < 1 or grid.size == 0 or not np.issubdtype(grid.dtype, np.integer):
        raise ShardingError(
            f"a grid is an array of device numbers whose last axis counts replicas, not "
            f"{grid.tolist()} of shape {grid.shape} and dtype {grid.dtype}"
        )
    devices, times = np.unique(grid, return_counts=True)
    wrong = [
        f"device {device} is named {n} times"
        for device, n in zip(devices.tolist(), times.tolist(), strict=True)
        if n > 1
    ]
    wrong += [f"there is no device {d}" for d in devices.tolist() if not 0 <= d < count]
    if wrong:
        raise ShardingError(
            f"the grid {grid.tolist()} is no layout over {count} devices: {'; '.join(wrong)}. "
            f"Name each of 0..{count - 1} at most once."
        )


def _is_sharding(spec: Any) -> bool:
    """Whether a spec is a sharding: one over another grid of the mesh's devices."""
    return isinstance(spec, NamedSharding)


register_spelling(_is_sharding, lambda sharding, _, ndim: Tiles.from_sharding(sharding, ndim))
