"""Filling a tensor on a mesh from a checkpoint, shard by shard."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch.distributed.checkpoint.planner import ReadItem

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.errors import CheckpointError
from isoshard.core.layout.uneven import Sizes
from isoshard.core.layout.valid_elements import valid_slices
from isoshard.torch_bridge._torch_internals.checkpoint_types import ChunkStorageMetadata
from isoshard.torch_bridge.common.exchange import to_numpy
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values.value import Aval, Value
from isoshard.torch_bridge.state.torch_state import layout_of

from .tensor_shards import chunk_at, chunk_of


@dataclasses.dataclass(eq=False)
class _Buffer:
    """Host memory for the shard of some devices.

    Attributes:
        shape: of the buffer.
        devices: that have it.
        waiting: elements that are still to be read.
        valid: elements that are read at all; the others are padding, and zero.
        host: the memory, once it is needed.
    """

    shape: tuple[int, ...]
    devices: list[Any]
    waiting: int = 0
    valid: int = 0
    host: torch.Tensor | None = None

    def memory(self, dtype: torch.dtype) -> torch.Tensor:
        """Its memory."""
        if self.host is None:
            make = torch.zeros if self.valid < math.prod(self.shape) else torch.empty
            self.host = make(self.shape, dtype=dtype)
        return self.host


@dataclasses.dataclass(frozen=True, eq=False)
class _ShardBuffer:
    """Elements that are read together, and where they go."""

    chunk: ChunkStorageMetadata
    inside: tuple[slice, ...]
    buffer: _Buffer


class Arrival:
    """Host memory for the shards of a tensor until each is complete and goes to its devices.

    When the last one is complete the tensor is written in place, with its mark, sharding and dtype.
    In blocks of unequal sizes the padding becomes zero.

    Args:
        name: of the tensor in the checkpoint.
        tensor: on the `jax` device.
    """

    def __init__(self, name: str, tensor: lazy_tensor.LazyTensor):
        """See the class."""
        self.name = name
        self._tensor = tensor
        layout = layout_of(tensor)
        self._blocks = layout if isinstance(layout, BlockLayout) else None
        self._sharding = layout.sharding if isinstance(layout, BlockLayout) else layout
        self._shape = layout.padded if isinstance(layout, BlockLayout) else tuple(tensor.shape)
        sizes: Sizes = (None,) * tensor.dim() if self._blocks is None else self._blocks.sizes
        self._buffers: dict[torch.Size, _Buffer] = {}
        self._shards: dict[torch.Size, _ShardBuffer] = {}
        self._missing: dict[torch.Size, int] = {}
        self._arrays: dict[Any, jax.Array] = {}
        if self._sharding is None:
            self._add(tuple(slice(None) for _ in self._shape), sizes)
            return
        for device, index in self._sharding.addressable_devices_indices_map(self._shape).items():
            self._add(index or (), sizes).devices.append(device)

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """The distinct shards of this process."""
        return [shard.chunk for shard in self._shards.values()]

    @property
    def done(self) -> bool:
        """Whether every element was read and the tensor written."""
        return not any(self._missing.values())

    def expect(self, reads: Sequence[ReadItem]) -> None:
        """Check that the reads cover every shard; a tensor without shards is written at once.

        Raises:
            CheckpointError: they do not.
        """
        coming = dict.fromkeys(self._shards, 0)
        for read in reads:
            coming[_offsets(read)] += math.prod(read.lengths)
        short = [tuple(at) for at, count in coming.items() if count != self._missing[at]]
        if short:
            raise CheckpointError(
                f"{self.name}: the checkpoint has only some elements of this tensor of shape "
                f"{tuple(self._tensor.shape)}; the shards at {short} cannot be filled"
            )
        if self._buffers and not self._shards:  # only empty blocks here, and no read will come
            self._write()

    def buffer(self, offsets: Sequence[int]) -> torch.Tensor:
        """Host memory for the shard that begins at `offsets`, in the tensor's dtype."""
        shard = self._shards[torch.Size(offsets)]
        return shard.buffer.memory(self._tensor.dtype)[shard.inside]

    def commit(self, read: ReadItem) -> None:
        """Record a completed read; the last one writes the tensor."""
        key = _offsets(read)
        count = math.prod(read.lengths)
        self._missing[key] -= count
        buffer = self._shards[key].buffer
        buffer.waiting -= count
        if buffer.waiting == 0:
            self._send(buffer)
        if self.done:
            self._write()

    def _add(self, index: Sequence[slice], sizes: Sizes) -> _Buffer:
        """Memory for the block at `index`, which several devices may have."""
        start = chunk_at(index, self._shape)
        if start.offsets not in self._buffers:
            buffer = self._buffers[start.offsets] = _Buffer(tuple(start.sizes), [])
            for valid in valid_slices(index, self._shape, sizes):
                chunk = chunk_of(valid)
                self._shards[chunk.offsets] = _ShardBuffer(chunk, valid.inside, buffer)
                self._missing[chunk.offsets] = math.prod(chunk.sizes)
                buffer.valid += math.prod(chunk.sizes)
            buffer.waiting = buffer.valid
        return self._buffers[start.offsets]

    def _send(self, buffer: _Buffer) -> None:
        """Copy a complete buffer to its devices."""
        if self._sharding is None:
            return
        array = to_numpy(buffer.memory(self._tensor.dtype))
        buffer.host = None
        physical = self._tensor._aval.physical
        if array.dtype != physical:
            array = lazy_tensor.narrow(array, physical, self._tensor.dtype)
        for device in buffer.devices:
            with jax.enable_x64(True):
                self._arrays[device] = jax.device_put(array, device, may_alias=True)

    def _write(self) -> None:
        shape, dtype = tuple(self._tensor.shape), self._tensor.dtype
        if self._sharding is None:
            (buffer,) = self._buffers.values()
            value = lazy_tensor.host_value(buffer.memory(dtype), snapshot=False)
        else:
            for buffer in self._buffers.values():
                if buffer.valid == 0:  # of an empty block nothing was read
                    self._send(buffer)
            order = self._sharding.addressable_devices_indices_map(self._shape)
            array = jax.make_array_from_single_device_arrays(
                self._shape, self._sharding, [self._arrays[device] for device in order]
            )
            value = Value.of(array if self._blocks is None else self._blocks.wrap(array))
        self._buffers.clear()
        self._shards.clear()
        self._arrays.clear()
        with torch.no_grad():
            self._tensor.copy_(lazy_tensor.fresh(Aval.contiguous(shape, dtype), value))


def _offsets(read: ReadItem) -> torch.Size:
    return torch.Size(read.dest_index.offset or ())
