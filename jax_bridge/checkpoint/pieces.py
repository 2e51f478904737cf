"""The elements that this process writes: of each array its distinct pieces, in host memory.

A sharded array is never gathered: a piece is read from the buffer of one device, on CPU devices
without a copy. Of replicas the first is written, whichever process has it.

>>> from isoshard.core.mesh import make_mesh
>>> from isoshard.core.place import shard
>>> a = shard(np.arange(8.0, dtype=np.float32), make_mesh((2, 4), ("x", "y")), ("y",))
>>> content = Content.of("a", a, "float32")
>>> [(piece.index[0].start, piece.host.tolist()) for piece in content.pieces()]
[(0, [0.0, 1.0]), (2, [2.0, 3.0]), (4, [4.0, 5.0]), (6, [6.0, 7.0])]
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import NamedSharding

from isoshard.core import metrics
from isoshard.core.checkpoints.source import Entry
from isoshard.core.entries import entries_of
from isoshard.core.errors import ShardingError

from .grid import Grid, cut

SMALL = 256
"""Bytes up to which an array that one process has whole stands among the names."""


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A block of an array.

    Attributes:
        index: per axis a slice with start and stop.
        host: the elements.
    """

    index: tuple[slice, ...]
    host: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Content:
    """An array on its way into a checkpoint.

    Attributes:
        entry: what the checkpoint says of it.
        array: the elements: an array, or what `copied` took of one.
        shard: shape of what a device holds; it divides the array's.
        is_small: whether it stands among the names, and has no files.
    """

    entry: Entry
    array: jax.Array | np.ndarray | list[Piece]
    shard: tuple[int, ...]
    is_small: bool

    @classmethod
    def of(cls, name: str, array: jax.Array | np.ndarray, dtype: str, impl: str = "") -> Content:
        """Look at an array.

        Args:
            name: of the array, for messages.
            array: on any devices, or in host memory.
            dtype: name of its logical dtype.
            impl: of random keys, whose words `array` holds.

        Returns:
            The content, not copied.

        Raises:
            ShardingError: its elements are sums that are still to be taken.
        """
        shape = tuple(array.shape)
        if isinstance(array, np.ndarray):
            entry = Entry(shape, dtype, array.dtype.name, impl=impl)
            return cls(entry, array, shape, _is_small(entry, True))
        layout = array.sharding
        spec = _axes(name, layout, len(shape)) if isinstance(layout, NamedSharding) else None
        entry = Entry(shape, dtype, array.dtype.name, spec, impl=impl)
        first_has = array.is_fully_addressable or (
            layout.is_fully_replicated and any(d.process_index == 0 for d in layout.device_set)
        )
        shard = layout.shard_shape(shape) if entry.nbytes else shape
        return cls(entry, array, shard, _is_small(entry, first_has))

    def grid(self) -> Grid:
        """How it is cut into files and chunks."""
        return cut(self.entry.shape, self.shard, jax.numpy.dtype(self.entry.stored).itemsize)

    def pieces(self) -> list[Piece]:
        """What this process writes. What each process has for itself, the first one writes."""
        array, shape = self.array, self.entry.shape
        if isinstance(array, list):
            return array
        whole_here = isinstance(array, np.ndarray) or array.is_fully_addressable
        if whole_here and jax.process_index() != 0:
            return []
        if isinstance(array, np.ndarray):
            return [Piece(tuple(slice(0, extent) for extent in shape), array)]
        if self.is_small and not whole_here:
            everything = tuple(slice(0, extent) for extent in shape)
            return [Piece(everything, _on_host(array.addressable_data(0)))]
        return [
            Piece(bounded(shard.index, shape), _on_host(shard.data))
            for shard in array.addressable_shards
            if shard.replica_id == 0
        ]

    def copied(self) -> Content:
        """The same with memory of its own: later writes and donations are not seen."""
        pieces = [Piece(piece.index, _copy(piece.host)) for piece in self.pieces()]
        return dataclasses.replace(self, array=pieces)

    def whole(self) -> np.ndarray:
        """All elements, of an array whose pieces are all this process's."""
        found = np.empty(self.entry.shape, jax.numpy.dtype(self.entry.stored))
        for piece in self.pieces():
            found[piece.index] = piece.host
        return found


def bounded(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The same index with starts and stops.

    Example:
        >>> bounded((slice(None),), (4,))
        (slice(0, 4, None),)
    """
    return tuple(slice(*one.indices(extent)[:2]) for one, extent in zip(index, shape, strict=True))


def _is_small(entry: Entry, first_has: bool) -> bool:
    return entry.nbytes == 0 or (entry.nbytes <= SMALL and first_has)


def _axes(name: str, sharding: NamedSharding, rank: int) -> tuple[tuple[str, ...], ...]:
    if getattr(sharding.spec, "unreduced", ()):
        raise ShardingError(
            f"{name}: a checkpoint holds elements, and these are sums still to be taken over "
            f"{sharding.spec}; lay it out first: iso.reshard(x, spec)"
        )
    entries = tuple(entries_of(sharding.spec))
    entries += (None,) * (rank - len(entries))
    return tuple(
        () if one is None else tuple(map(str, one)) if isinstance(one, tuple) else (str(one),)
        for one in entries
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
