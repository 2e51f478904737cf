"""A tensor on a mesh that is being filled from a checkpoint, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from isoshard.core.errors import CheckpointError
from isoshard.torch_bridge.engine import base
from isoshard.torch_bridge.engine.value import Aval, Value
from isoshard.torch_bridge.exchange import to_numpy

from .parts import layout_of
from .pieces import chunk_at


class Arrival:
    """Host memory for the pieces of a tensor until each is complete, and then its devices.

    When the last piece is complete the tensor is written in place; it keeps mark, layout and dtype.

    Args:
        name: of the tensor in the checkpoint.
        tensor: on the `jax` device.
    """

    def __init__(self, name: str, tensor: base.LazyTensor):
        """See the class."""
        self.name = name
        self._tensor = tensor
        self._sharding = layout_of(tensor)
        self._devices: dict[torch.Size, list[Any]] = {}
        self._chunks: dict[torch.Size, ChunkStorageMetadata] = {}
        if self._sharding is None:
            whole = chunk_at([slice(None)] * tensor.dim(), tensor.shape)
            self._chunks[whole.offsets] = whole
        else:
            places = self._sharding.addressable_devices_indices_map(tuple(tensor.shape))
            for device, index in places.items():
                chunk = chunk_at(index or (), tensor.shape)
                self._chunks[chunk.offsets] = chunk
                self._devices.setdefault(chunk.offsets, []).append(device)
        self._buffers: dict[torch.Size, torch.Tensor] = {}
        self._missing = {offsets: math.prod(c.sizes) for offsets, c in self._chunks.items()}
        self._arrays: dict[Any, jax.Array] = {}

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """The distinct pieces that this process holds."""
        return list(self._chunks.values())

    @property
    def done(self) -> bool:
        """Whether every element was read and the tensor written."""
        return not any(self._missing.values())

    def expect(self, reads: Sequence[ReadItem]) -> None:
        """Check that the reads cover every piece.

        Args:
            reads: all that will be committed.

        Raises:
            CheckpointError: they do not.
        """
        coming = dict.fromkeys(self._chunks, 0)
        for read in reads:
            coming[_offsets(read)] += math.prod(read.lengths)
        short = [tuple(at) for at, count in coming.items() if count != self._missing[at]]
        if short:
            raise CheckpointError(
                f"{self.name}: the checkpoint holds only a part of this tensor of shape "
                f"{tuple(self._tensor.shape)}; the pieces at {short} cannot be filled"
            )

    def buffer(self, offsets: Sequence[int]) -> torch.Tensor:
        """Host memory for the piece that begins at `offsets`, in the tensor's dtype."""
        key = torch.Size(offsets)
        found = self._buffers.get(key)
        if found is None:
            sizes = self._chunks[key].sizes
            found = self._buffers[key] = torch.empty(sizes, dtype=self._tensor.dtype)
        return found

    def commit(self, read: ReadItem) -> None:
        """Note a read that is done; the last one of all writes the tensor."""
        key = _offsets(read)
        self._missing[key] -= math.prod(read.lengths)
        if self._missing[key] == 0:
            self._send(key)
        if self.done:
            self._write()

    def _send(self, key: torch.Size) -> None:
        """Bring a complete piece to the devices that hold it."""
        if self._sharding is None:
            return
        array = to_numpy(self._buffers.pop(key))
        physical = self._tensor._aval.physical
        if array.dtype != physical:
            array = base.narrow(array, physical, self._tensor.dtype)
        for device in self._devices[key]:
            self._arrays[device] = jax.device_put(array, device, may_alias=True)

    def _write(self) -> None:
        shape, dtype = tuple(self._tensor.shape), self._tensor.dtype
        if self._sharding is None:
            (host,) = self._buffers.values()
            value = base.host_value(host, snapshot=False)
        else:
            order = self._sharding.addressable_devices_indices_map(shape)
            array = jax.make_array_from_single_device_arrays(
                shape, self._sharding, [self._arrays[device] for device in order]
            )
            value = Value.of(array)
        self._buffers.clear()
        self._arrays.clear()
        with torch.no_grad():
            self._tensor.copy_(base.fresh(Aval.contiguous(shape, dtype), value))


def _offsets(read: ReadItem) -> torch.Size:
    return torch.Size(read.dest_index.offset or ())
