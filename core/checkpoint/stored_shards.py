"""The elements that this process writes: distinct shards of each array, in host memory.

A sharded array is never gathered: a shard is read from the buffer of one device, on CPU devices
without a copy. Of replicas the first is written, whichever process has it; of an `UnevenArray` the
valid elements of each block.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> a = shard(np.arange(8.0, dtype=np.float32), make_mesh((2, 4), ("x", "y")), ("y",))
>>> content = Content.of("a", a, "float32")
>>> [(shard.index[0].start, shard.host.tolist()) for shard in content.shards()]
[(0, [0.0, 1.0]), (2, [2.0, 3.0]), (4, [4.0, 5.0]), (6, [6.0, 7.0])]
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from isoshard.core.errors import ShardingError
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.layout.valid_elements import local_elements
from isoshard.core.runtime import metrics

from .chunk_grid import Grid, file_size, grid_of
from .source import Entry

SMALL = 256
"""Bytes up to which an array that one process has in full is stored in the tree's file."""


@dataclasses.dataclass(frozen=True, eq=False)
class StoredShard:
    """A block of an array.

    Attributes:
        index: per axis a slice with start and stop.
        host: the elements.
        joined: whether they were copied together from several shards.
    """

    index: tuple[slice, ...]
    host: np.ndarray
    joined: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Content:
    """An array that is saved to a checkpoint.

    Attributes:
        entry: of the checkpoint.
        array: the elements: an array, or the shards that `copied` took of one.
        shard: shape of the shard of a device; in blocks of unequal sizes, of a file.
        is_small: whether it is stored in the tree's file, and has none of its own.
    """

    entry: Entry
    array: jax.Array | UnevenArray | np.ndarray | list[StoredShard]
    shard: tuple[int, ...]
    is_small: bool

    @classmethod
    def of(
        cls, name: str, array: jax.Array | UnevenArray | np.ndarray, dtype: str, impl: str = ""
    ) -> Content:
        """The content of an array, not copied.

        Args:
            name: of the array, for messages.
            array: on any devices, or in host memory; of random keys their words.
            dtype: name of its logical dtype.
            impl: of random keys.

        Raises:
            ShardingError: its elements are sums that are still to be taken.
        """
        shape = tuple(array.shape)
        if isinstance(array, np.ndarray):
            entry = Entry(shape, dtype, array.dtype.name, impl=impl)
            return cls(entry, array, shape, _is_small(array.nbytes, True))
        inner = array.array if isinstance(array, UnevenArray) else array
        layout = inner.sharding
        spec = _axes(name, layout, len(shape)) if isinstance(layout, NamedSharding) else None
        entry = Entry(shape, dtype, array.dtype.name, spec, impl=impl)
        first_has = inner.is_fully_addressable or (
            layout.is_fully_replicated and any(d.process_index == 0 for d in layout.device_set)
        )
        nbytes = math.prod(shape) * array.dtype.itemsize
        shard = layout.shard_shape(inner.shape) if nbytes else shape
        if isinstance(array, UnevenArray) and nbytes:
            pairs = zip(shard, array.sizes, strict=True)
            shard = tuple(n if sizes is None else file_size(sizes) for n, sizes in pairs)
        return cls(entry, array, shard, _is_small(nbytes, first_has))

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements as they are stored."""
        return math.prod(self.entry.shape) * jax.numpy.dtype(self.entry.stored).itemsize

    def logical(self) -> Any:
        """The array with its logical dtype: random keys as keys."""
        array: Any = self.array
        return jax.random.wrap_key_data(array, impl=self.entry.impl) if self.entry.impl else array

    def grid(self) -> Grid:
        """Its files and chunks."""
        return grid_of(self.entry.shape, self.shard, jax.numpy.dtype(self.entry.stored).itemsize)

    def shards(self) -> list[StoredShard]:
        """The shards that this process writes; only process 0 writes arrays that all have."""
        array, shape = self.array, self.entry.shape
        if isinstance(array, list):
            return array
        inner = array.array if isinstance(array, UnevenArray) else array
        is_complete = isinstance(inner, np.ndarray) or inner.is_fully_addressable
        if is_complete and jax.process_index() != 0:
            return []
        if isinstance(array, np.ndarray):
            return [StoredShard(tuple(slice(0, extent) for extent in shape), array)]
        if is_complete and isinstance(array, jax.Array):
            return [
                StoredShard(bounded(shard.index, shape), _on_host(shard.data))
                for shard in array.addressable_shards
                if shard.replica_id == 0
            ]
        buffers = local_elements(array)
        if self.is_small and not is_complete:  # each process has all of it
            written = [buffer for buffer in buffers if buffer.device == buffers[0].device]
        else:
            written = [buffer for buffer in buffers if buffer.replica_id == 0]
        return [
            StoredShard(shard.valid.index, _on_host(shard.buffer)[(*shard.valid.inside, ...)])
            for shard in written
        ]

    def copied(self) -> Content:
        """A copy in host memory, which later writes and donations do not change."""
        shards = [StoredShard(shard.index, _copy(shard.host)) for shard in self.shards()]
        return dataclasses.replace(self, array=shards)

    def full(self) -> np.ndarray:
        """All elements, of an array whose shards are all this process's."""
        full = np.empty(self.entry.shape, jax.numpy.dtype(self.entry.stored))
        for shard in self.shards():
            full[shard.index] = shard.host
        return full


def bounded(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """An index with starts and stops.

    Example:
        >>> bounded((slice(None),), (4,))
        (slice(0, 4, None),)
    """
    return tuple(
        slice(*axis.indices(extent)[:2]) for axis, extent in zip(index, shape, strict=True)
    )


def _is_small(nbytes: int, first_has: bool) -> bool:
    return nbytes == 0 or (nbytes <= SMALL and first_has)


def _axes(name: str, sharding: NamedSharding, rank: int) -> tuple[tuple[str, ...], ...]:
    if getattr(sharding.spec, "unreduced", ()):
        raise ShardingError(
            f"{name}: its elements are sums that are still to be taken over {sharding.spec}, which "
            "a checkpoint cannot store; reshard it first: iso.reshard(x, spec)"
        )
    entries = tuple(getattr(sharding.spec, "partitions", sharding.spec))
    entries += (None,) * (rank - len(entries))
    return tuple(
        () if axes is None else tuple(map(str, axes)) if isinstance(axes, tuple) else (str(axes),)
        for axes in entries
    )


def _on_host(data: jax.Array) -> np.ndarray:
    host = np.asarray(data)
    if any(device.platform != "cpu" for device in data.devices()):
        metrics.record_transfer("device_to_host", host.nbytes, metrics.user_location())
    return host


def _copy(host: np.ndarray) -> np.ndarray:
    metrics.count("copies")
    metrics.count("copied_bytes", host.nbytes)
    return np.array(host, copy=True, order="C")
