"""Reading arrays of a checkpoint: each process reads the shards of its own devices.

A shard of several devices is read once. On CPU devices the buffers that are read into become the
arrays. Padding, in blocks of unequal sizes, is zero.

>>> import tempfile, isoshard as iso
>>> mesh = iso.make_mesh((2, 4), ("x", "y"))
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = iso.save(folder, {"w": np.arange(8.0, dtype=np.float32)})
...     like = jax.ShapeDtypeStruct((8,), "float32", sharding=iso.NamedSharding(mesh, iso.P("y")))
...     [shard.data.tolist() for shard in iso.restore(folder, {"w": like})["w"].addressable_shards][:2]
[[0.0, 1.0], [2.0, 3.0]]
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.checkpoint.source import Block, Entry, Memory, Source
from isoshard.core.layout.uneven import Sizes, UnevenArray
from isoshard.core.layout.valid_elements import valid_slices
from isoshard.core.transfer.device_dtypes import check_narrowing, device_dtype
from isoshard.core.transfer.host_memory import aligned_empty

from .slots import Slot, is_key
from .stored_shards import bounded

AT_ONCE = 1 << 30
"""Bytes of host memory that are read before they are copied to devices."""


def read_arrays(
    source: Source, slots: Sequence[Slot], saved: Mapping[str, Entry]
) -> dict[str, jax.Array | UnevenArray | np.ndarray]:
    """Read the arrays of slots, by name: in host memory, or on devices.

    Args:
        source: the checkpoint.
        slots: checked; those that are no arrays are left out.
        saved: the entries of the checkpoint.

    Raises:
        CheckpointError: something was altered or is missing.
        CopyError: a 64-bit integer does not fit the 32 bits that it is to be stored in.
    """
    arrays: dict[str, jax.Array | UnevenArray | np.ndarray] = {}
    for batch in _batches([_Arrival(slot, saved[slot.name]) for slot in slots if slot.target]):
        source.read([block for arrival in batch for block in arrival.blocks])
        for arrival in batch:
            arrays[arrival.name] = arrival.array()
    return arrays


class _Arrival:
    """An array that is being read: each distinct buffer with its devices.

    Attributes:
        name: of the array.
        blocks: to be read, into slices of the memory.
    """

    def __init__(self, slot: Slot, entry: Entry):
        assert slot.target is not None
        self.name = slot.name
        self._target, self._entry = slot.target, entry
        self._buffers: list[np.ndarray] = []
        self._devices: dict[tuple[int, ...], list[Any]] = {}
        self.blocks: list[Block] = []
        destination = slot.target.destination
        self._shape: tuple[int, ...] = entry.shape
        sizes: Sizes = (None,) * len(entry.shape)
        if isinstance(destination, BlockLayout):
            self._shape, sizes, destination = (
                destination.padded,
                destination.sizes,
                destination.sharding,
            )
        self._sharding = destination
        if isinstance(destination, Memory):
            self._buffer(tuple(slice(0, extent) for extent in entry.shape), sizes)
            return
        for device, index in destination.addressable_devices_indices_map(self._shape).items():
            index = bounded(index or (), self._shape)
            start = tuple(axis.start for axis in index)
            if start not in self._devices:
                self._buffer(index, sizes)
            self._devices.setdefault(start, []).append(device)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def array(self) -> jax.Array | UnevenArray | np.ndarray:
        """The array, once its blocks are read."""
        if self._sharding is Memory.HOST:
            return self._narrowed(jax.numpy.dtype(self._target.dtype), self._buffers[0])
        if not self._target.wide:
            return self._on_devices(device_dtype(jax.numpy.dtype(self._entry.stored), self.name))
        with jax.enable_x64(True):
            return self._on_devices(jax.numpy.dtype(self._target.dtype))

    def _on_devices(self, dtype: np.dtype) -> jax.Array | UnevenArray:
        sharding = self._sharding
        array: Any
        if isinstance(sharding, Memory):
            array = jax.device_put(self._narrowed(dtype, self._buffers[0]), may_alias=True)
        else:
            shards: dict[Any, jax.Array] = {}
            for buffer, devices in zip(self._buffers, self._devices.values(), strict=True):
                host = self._narrowed(dtype, buffer)
                shards |= {
                    device: jax.device_put(host, device, may_alias=True) for device in devices
                }
            order = sharding.addressable_devices_indices_map(self._shape)
            array = jax.make_array_from_single_device_arrays(
                self._shape, sharding, [shards[device] for device in order], dtype=dtype
            )
        if is_key(self._target.dtype):
            return jax.random.wrap_key_data(array, impl=self._entry.impl)
        layout = self._target.destination
        return layout.wrap(array) if isinstance(layout, BlockLayout) else array

    def _buffer(self, index: tuple[slice, ...], sizes: Sizes) -> None:
        """Add a buffer for the elements at `index`, zero where no block is read into it."""
        shape = tuple(axis.stop - axis.start for axis in index)
        buffer = aligned_empty(shape, jax.numpy.dtype(self._entry.stored))
        self._buffers.append(buffer)
        slices = valid_slices(index, self._shape, sizes)
        blocks = [Block(self.name, valid.index, buffer[(*valid.inside, ...)]) for valid in slices]
        if sum(block.out.size for block in blocks) < buffer.size:
            buffer[...] = 0
        self.blocks += blocks

    def _narrowed(self, dtype: np.dtype, out: np.ndarray) -> np.ndarray:
        """The values in another integer dtype, or CopyError if they do not fit."""
        if out.dtype == dtype:
            return out
        if dtype.itemsize < out.dtype.itemsize:
            check_narrowing(out, dtype, None, self.name)
        return out.astype(dtype)


def _batches(arrivals: Sequence[_Arrival]) -> Iterator[list[_Arrival]]:
    batch: list[_Arrival] = []
    for arrival in arrivals:
        if batch and math.fsum(other.nbytes for other in batch) + arrival.nbytes > AT_ONCE:
            yield batch
            batch = []
        batch.append(arrival)
    if batch:
        yield batch
