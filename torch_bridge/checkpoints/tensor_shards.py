"""The shards of a tensor in a checkpoint: each once, on however many devices it is.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
>>> t = xs.mark_sharding(torch.arange(8).to("jax"), mesh, ("y",))     # each shard on two devices
>>> [(shard.chunk.offsets, shard.index) for shard in shards_of(t)]
[(torch.Size([0]), 0), (torch.Size([2]), 1), (torch.Size([4]), 2), (torch.Size([6]), 3)]
>>> on_host(t).shards[1].data
tensor([2, 3])

The tensor is never gathered: a shard is read from the buffer of one device, on CPU devices without
a copy. In blocks of unequal sizes a shard has no padding; empty blocks have no shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.layout.valid_elements import ShardElements, ValidSlice, local_elements
from isoshard.core.runtime import metrics
from isoshard.torch_bridge._torch_internals.checkpoint_types import ChunkStorageMetadata
from isoshard.torch_bridge.common.exchange import from_numpy, shard_to_torch
from isoshard.torch_bridge.engine.operators import reading
from isoshard.torch_bridge.engine.recording import lazy_tensor


@dataclasses.dataclass(frozen=True)
class StoredShard:
    """A shard that this process writes.

    Attributes:
        chunk: offsets and sizes in the global tensor.
        index: its index among the shards of this process, in mesh order, without empty ones.
    """

    chunk: ChunkStorageMetadata
    index: int


@dataclasses.dataclass(frozen=True)
class HostShard:
    """A shard in host memory.

    Attributes:
        chunk: offsets and sizes in the global tensor.
        index: its index among the shards of this process, in mesh order.
        data: the elements, a CPU tensor with memory of its own.
    """

    chunk: ChunkStorageMetadata
    index: int
    data: torch.Tensor


@dataclasses.dataclass(frozen=True)
class HostShards:
    """A snapshot of a sharded tensor in host memory, still sharded.

    Attributes:
        shards: each once.
        global_shape: of the tensor.
        properties: dtype and the like, as checkpoints have them.
    """

    shards: list[HostShard]
    global_shape: torch.Size
    properties: TensorProperties

    def size(self) -> torch.Size:
        """The global shape."""
        return self.global_shape


def chunk_at(index: Sequence[slice], shape: Sequence[int]) -> ChunkStorageMetadata:
    """The offsets and sizes of a shard, by its index into an array of a shape."""
    bounds = [axis.indices(extent)[:2] for axis, extent in zip(index, shape, strict=True)]
    return ChunkStorageMetadata(
        offsets=torch.Size([start for start, _ in bounds]),
        sizes=torch.Size([stop - start for start, stop in bounds]),
    )


def is_sharded(tensor: lazy_tensor.LazyTensor) -> bool:
    """Whether devices have different shards of it; executes what is recorded if need be."""
    array = reading.stored_array(tensor)
    return isinstance(array, UnevenArray) or not array.sharding.is_fully_replicated


def shards_of(tensor: lazy_tensor.LazyTensor) -> list[StoredShard]:
    """The shards of a tensor on `jax` that this process writes: of replicas the first."""
    return [
        StoredShard(chunk_of(shard.valid), index)
        for index, shard in enumerate(local_elements(reading.stored_array(tensor)))
        if shard.replica_id == 0
    ]


def shard_at(array: jax.Array | UnevenArray, offsets: Sequence[int]) -> ShardElements:
    """The shard of a device of this process that begins at `offsets`."""
    for shard in local_elements(array):
        if chunk_of(shard.valid).offsets == torch.Size(offsets):
            return shard
    raise ValueError(f"no device of this process has a shard that begins at {tuple(offsets)}")


def host(shard: ShardElements, dtype: torch.dtype, *, copy: bool = False) -> torch.Tensor:
    """The valid elements of one device's buffer as a CPU tensor; its memory has no others.

    Args:
        shard: on one device.
        dtype: the logical dtype of the tensor, which may be wider than the buffer's.
        copy: False shares the memory of a CPU device that has no padding; True never does.
    """
    if any(device.platform != "cpu" for device in shard.buffer.devices()):
        array = np.array(shard.buffer)
        metrics.record_transfer("device_to_host", array.nbytes, metrics.user_location())
        view, owned = from_numpy(array, dtype), True
    else:
        view, owned = shard_to_torch(shard.buffer), False
    valid = view[shard.valid.inside]
    converted = valid.to(dtype)
    padded = valid.numel() < view.numel()
    return (
        converted.clone() if converted is valid and (padded or (copy and not owned)) else converted
    )


def on_host(tensor: lazy_tensor.LazyTensor) -> HostShards | torch.Tensor:
    """Copy a tensor on `jax` to the host: its shards; one CPU tensor if it is replicated."""
    array = reading.stored_array(tensor)
    shards = local_elements(array)
    if not isinstance(array, UnevenArray) and array.sharding.is_fully_replicated:
        return host(shards[0], tensor.dtype, copy=True)
    return HostShards(
        [
            HostShard(chunk_of(shard.valid), index, host(shard, tensor.dtype, copy=True))
            for index, shard in enumerate(shards)
            if shard.replica_id == 0
        ],
        tensor.size(),
        TensorProperties(dtype=tensor.dtype, requires_grad=tensor.requires_grad),
    )


def chunk_of(valid: ValidSlice) -> ChunkStorageMetadata:
    """The offsets and sizes of valid elements."""
    return ChunkStorageMetadata(
        offsets=torch.Size([axis.start for axis in valid.index]),
        sizes=torch.Size([axis.stop - axis.start for axis in valid.index]),
    )
