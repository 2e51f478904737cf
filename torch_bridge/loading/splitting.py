"""How tensors of one rank are split by a `ShardingSpec`, in a process that may be one of several.

With `minibatch=True` each process gives its part of the batch; how large the whole is follows from
which blocks of the mesh are this process's.

>>> import isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (4, 2), ("data", "model"))
>>> split = Split(xs.ShardingSpec(mesh, ("data", None)), 2)
>>> split.parts(0)
4
>>> split.over((12, 5), "batch").sharding.spec
P('data',)
>>> split.over((10, 5), "batch").sharding.spec      # 4 does not divide 10
P()
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding

from isoshard.core.errors import UnevenError
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.spec import check_even, named_sharding
from isoshard.core.layout.tiles import Tiles
from isoshard.torch_bridge.spmd.mark_errors import MinibatchError


@dataclasses.dataclass
class Where:
    """Where a tensor goes.

    Attributes:
        shape: of the whole tensor, over all processes.
        sharding: the layout of its buffers.
        asked: the layout that the spec means, where some axis does not divide and stays whole.
        fault: which.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding
    asked: NamedSharding | None
    fault: str


class Split:
    """A spec for tensors of one rank.

    Args:
        spec: a `ShardingSpec`.
        rank: of the tensors. Those of another rank than the spec's are whole on every device.

    Attributes:
        spec: the partition spec.
        fits: whether the spec has one entry per axis.
        minibatch: whether a tensor is only this process's part.

    Raises:
        SpecError: the spec does not fit the mesh.
    """

    def __init__(self, spec: Any, rank: int):
        """See the class."""
        self.spec = tuple(spec.partition_spec)
        self.fits = len(self.spec) == rank
        self._mesh = spec.mesh
        self._rank = rank
        self._entries = list(self.spec) if self.fits else []
        self._sharding = named_sharding(tuple(self._entries), self._mesh, rank)
        tiles = Tiles.from_sharding(self._sharding, rank)
        self._blocks = tiles.blocks
        self._mine = _mine(self._sharding, tiles)
        self.minibatch = bool(spec.minibatch) and self.fits

    def parts(self, axis: int) -> int:
        """Shards along an axis of the tensors that this process gives."""
        counts = self._mine if self.minibatch else self._blocks
        return counts[axis] if axis < self._rank else 1

    def divides(self, tensor: torch.Tensor, axis: int) -> bool:
        """Whether an axis of a tensor splits evenly."""
        return axis >= self._rank or tensor.shape[axis] % self.parts(axis) == 0

    def over(self, shape: Sequence[int], name: str) -> Where:
        """Where a tensor goes.

        Args:
            shape: of what this process gives.
            name: of the tensor, for messages.

        Raises:
            UnevenError: this process's part of a batch does not split evenly over its shards.
        """
        if self.minibatch:
            shape = self._whole(shape, name)
        try:
            check_even(self._sharding.spec, mesh_of(self._sharding), shape, name=name)
        except UnevenError as error:
            even = (
                None if size % blocks else entry
                for entry, size, blocks in zip(self._entries, shape, self._blocks, strict=True)
            )
            found = named_sharding(tuple(even), self._mesh, self._rank)
            return Where(tuple(shape), found, self._sharding, str(error))
        return Where(tuple(shape), self._sharding, None, "")

    def _whole(self, part: Sequence[int], name: str) -> tuple[int, ...]:
        for axis, (size, mine) in enumerate(zip(part, self._mine, strict=True)):
            if size % mine:
                raise MinibatchError(
                    f"{name}: axis {axis} has size {size} in this process, which its {mine} shards "
                    f"of that axis (spec {self.spec}) do not divide"
                )
        scale = zip(part, self._blocks, self._mine, strict=True)
        return tuple(size * blocks // mine for size, blocks, mine in scale)


def _mine(sharding: NamedSharding, tiles: Tiles) -> tuple[int, ...]:
    """Blocks along each axis that lie on this process's devices."""
    here = jax.process_index()
    devices = list(mesh_of(sharding).devices.flat)
    blocks = [b for n, b in tiles.block_of().items() if devices[n].process_index == here]
    return tuple(max(1, len({block[axis] for block in blocks})) for axis in range(tiles.ndim))
