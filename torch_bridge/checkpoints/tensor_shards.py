"""The pieces of a tensor that a checkpoint holds: each once, on however many devices it lies.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
>>> t = xs.mark_sharding(torch.arange(8).to("jax"), mesh, ("y",))     # each piece on two devices
>>> [(piece.chunk.offsets, piece.number) for piece in pieces_of(t)]
[(torch.Size([0]), 0), (torch.Size([2]), 1), (torch.Size([4]), 2), (torch.Size([6]), 3)]
>>> on_host(t).shards[1].data
tensor([2, 3])

The whole tensor is never gathered: a piece is read from the buffer of one device, on CPU devices
without a copy. In blocks of unequal sizes a piece is what is valid in a buffer; empty blocks have
none.
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
    """A piece that this process writes.

    Attributes:
        chunk: offsets and sizes in the whole tensor.
        number: its place among the shards of this process, in mesh order; empty ones do not count.
    """

    chunk: ChunkStorageMetadata
    number: int


@dataclasses.dataclass(frozen=True)
class HostShard:
    """One piece in host memory.

    Attributes:
        chunk: offsets and sizes in the whole tensor.
        number: its place among the shards of this process, in mesh order.
        data: the elements, a CPU tensor with memory of its own.
    """

    chunk: ChunkStorageMetadata
    number: int
    data: torch.Tensor


@dataclasses.dataclass(frozen=True)
class HostShards:
    """A snapshot of a sharded tensor in host memory, still in pieces.

    Attributes:
        shards: its pieces, each once.
        global_shape: of the whole tensor.
        properties: dtype and the like, as checkpoints note them.
    """

    shards: list[HostShard]
    global_shape: torch.Size
    properties: TensorProperties

    def size(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.global_shape


def chunk_at(index: Sequence[slice], shape: Sequence[int]) -> ChunkStorageMetadata:
    """Where a shard lies, in the words of torch's checkpoints.

    Args:
        index: one slice per axis.
        shape: of the whole tensor.
    """
    bounds = [one.indices(extent)[:2] for one, extent in zip(index, shape, strict=True)]
    return ChunkStorageMetadata(
        offsets=torch.Size([start for start, _ in bounds]),
        sizes=torch.Size([stop - start for start, stop in bounds]),
    )


def is_sharded(tensor: lazy_tensor.LazyTensor) -> bool:
    """Whether devices hold different parts of it; executes what is recorded if need be."""
    array = reading.held(tensor)
    return isinstance(array, UnevenArray) or not array.sharding.is_fully_replicated


def pieces_of(tensor: lazy_tensor.LazyTensor) -> list[StoredShard]:
    """The pieces that this process writes: of replicas the first, wherever it lies.

    Args:
        tensor: on the `jax` device.
    """
    return [
        StoredShard(chunk_of(one.valid), number)
        for number, one in enumerate(local_elements(reading.held(tensor)))
        if one.replica_id == 0
    ]


def piece_at(array: jax.Array | UnevenArray, offsets: Sequence[int]) -> ShardElements:
    """What a device of this process holds of the piece that begins at `offsets`."""
    for one in local_elements(array):
        if chunk_of(one.valid).offsets == torch.Size(offsets):
            return one
    raise ValueError(f"no device of this process holds a piece that begins at {tuple(offsets)}")


def host(held: ShardElements, dtype: torch.dtype, *, copy: bool = False) -> torch.Tensor:
    """The valid elements of one device's buffer as a CPU tensor, all there is in its memory.

    Args:
        held: on one device.
        dtype: the logical dtype of the tensor, which may be wider than the buffer's.
        copy: False shares the memory of a CPU device that has no padding; True never does.
    """
    if any(device.platform != "cpu" for device in held.buffer.devices()):
        array = np.array(held.buffer)
        metrics.record_transfer("device_to_host", array.nbytes, metrics.user_location())
        view, mine = from_numpy(array, dtype), True
    else:
        view, mine = shard_to_torch(held.buffer), False
    valid = view[held.valid.inside]
    converted = valid.to(dtype)
    padded = valid.numel() < view.numel()
    return (
        converted.clone() if converted is valid and (padded or (copy and not mine)) else converted
    )


def on_host(tensor: lazy_tensor.LazyTensor) -> HostShards | torch.Tensor:
    """Copy a tensor to the host, piece by piece.

    Args:
        tensor: on the `jax` device.

    Returns:
        A CPU tensor if every device holds the whole, else its pieces.
    """
    array = reading.held(tensor)
    held = local_elements(array)
    if not isinstance(array, UnevenArray) and array.sharding.is_fully_replicated:
        return host(held[0], tensor.dtype, copy=True)
    return HostShards(
        [
            HostShard(chunk_of(one.valid), number, host(one, tensor.dtype, copy=True))
            for number, one in enumerate(held)
            if one.replica_id == 0
        ],
        tensor.size(),
        TensorProperties(dtype=tensor.dtype, requires_grad=tensor.requires_grad),
    )


def chunk_of(part: ValidSlice) -> ChunkStorageMetadata:
    """Where valid elements lie, in the words of torch's checkpoints."""
    return ChunkStorageMetadata(
        offsets=torch.Size([one.start for one in part.index]),
        sizes=torch.Size([one.stop - one.start for one in part.index]),
    )
