"""How tensors of one rank are split by a `ShardingSpec`, in a process that may be one of several.

With `minibatch=True` each process gives its part of the batch; how large the whole is follows from
which blocks of the mesh are this process's.

>>> import isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (4, 2), ("data", "model"))
>>> split = Split(xs.ShardingSpec(mesh, ("data", None)), 2)
>>> split.shards(0), split.global_shape((12, 5), "batch")
(4, (12, 5))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isoshard.core.kit import global_shape, local_block_indices, named_sharding
from isoshard.torch_bridge.kit import MinibatchError


class Split:
    """A spec for tensors of one rank.

    Args:
        spec: a `ShardingSpec`.
        rank: of the tensors. Those of another rank than the spec's are replicated.

    Attributes:
        spec: the partition spec.
        fits: whether the spec has one entry per axis.
        minibatch: whether a tensor is only this process's part.
        sharding: the layout that the spec means; its axes need not divide.

    Raises:
        SpecError: the spec does not fit the mesh.
    """

    def __init__(self, spec: Any, rank: int):
        """See the class."""
        self.spec = tuple(spec.partition_spec)
        self.fits = len(self.spec) == rank
        self.minibatch = bool(spec.minibatch) and self.fits
        self.sharding = named_sharding(self.spec if self.fits else (), spec.mesh, rank)
        blocks, local_blocks = local_block_indices(self.sharding, rank)
        self._shards = [max(1, len(b)) for b in local_blocks] if self.minibatch else blocks

    def shards(self, axis: int) -> int:
        """Shards along an axis of the tensors that this process gives."""
        return self._shards[axis] if axis < len(self._shards) else 1

    def global_shape(self, shape: Sequence[int], name: str) -> tuple[int, ...]:
        """The shape of a full tensor, over all processes.

        Args:
            shape: of what this process gives.
            name: of the tensor, for messages.

        Raises:
            MinibatchError: this process's part of a batch does not split over its shards.
        """
        if not self.minibatch:
            return tuple(shape)
        for axis, (size, shards) in enumerate(zip(shape, self._shards, strict=True)):
            if size % shards:
                raise MinibatchError(
                    f"{name}: axis {axis} has size {size} in this process, which its {shards} "
                    f"shards of that axis (spec {self.spec}) do not divide"
                )
        return global_shape(shape, self.sharding)
