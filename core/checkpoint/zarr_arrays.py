"""Arrays as Zarr (version 3) arrays, written and read by TensorStore.

Each array is a folder that any library for Zarr opens. A file holds what one device held, in chunks
with a CRC-32C each (Zarr's `sharding_indexed` and `crc32c` codecs): a reader with another mesh
reads the chunks it wants, and an altered one is noticed when it is read. Nothing is compressed, as
trained weights hardly shrink.

>>> import tempfile
>>> content = Content.of("w", np.arange(256.0), "float64")
>>> with tempfile.TemporaryDirectory() as folder:
...     write(folder, {"w": content}, create=True)
...     out = np.empty(2)
...     read(folder, {"w": content.grid()}, {"w": content.entry}, [Block("w", (slice(3, 5),), out)])
>>> list(files_of({"w": content})), out.tolist()
(['w/zarr.json', 'w/c.0'], [3.0, 4.0])

Specification: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from isoshard.core.checkpoint.source import Block, Entry
from isoshard.core.errors import CheckpointError
from isoshard.core.installation import install_command

from .chunk_grid import Grid
from .file_writes import by_file
from .stored_shards import Content

T = TypeVar("T")

AT_ONCE = 256 << 20
"""Bytes that are being read or written at a time."""
_MANY = 256
_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_SUMMED = [_BYTES, {"name": "crc32c"}]


def write(folder: str, contents: Mapping[str, Content], *, create: bool) -> None:
    """Write this process's pieces of arrays; each file is on the disk when this returns.

    Args:
        folder: that exists.
        contents: the arrays by the names of their folders.
        create: write their metadata, which one process does.
    """
    mode: dict[str, Any] = {"create": True} if create else {"open": True, "assume_metadata": True}
    tensorstore = imported()
    for batch in _batches(contents.items(), lambda item: item[1].nbytes):
        grids = {key: content.grid() for key, content in batch}
        opened = [
            (content, tensorstore.open(_spec(f"{folder}/{key}", content.entry, grids[key]), **mode))
            for key, content in batch
        ]
        writing, joined = [], 0
        for content, store in opened:
            for piece in by_file(content.pieces(), content.grid(), content.entry.shape):
                bits = _as_stored(piece.host)
                target = store.result()[piece.index]
                writing.append(target.write(bits, can_reference_source_data_indefinitely=True))
                joined += piece.host.nbytes * piece.joined
                if joined > AT_ONCE:
                    _ended(writing)
                    writing, joined = [], 0
            store.result()
        _ended(writing)


def files_of(contents: Mapping[str, Content]) -> Iterator[str]:
    """Every file that all processes together write, relative to their folder.

    Args:
        contents: as for `write`.
    """
    for key, content in contents.items():
        yield f"{key}/zarr.json"
        for place in itertools.product(*map(range, content.grid().count(content.entry.shape))):
            yield f"{key}/{'.'.join(['c', *map(str, place)])}"


def read(
    folder: str, grids: Mapping[str, Grid], entries: Mapping[str, Entry], blocks: Sequence[Block]
) -> None:
    """Fill blocks of memory.

    Args:
        folder: that `write` wrote.
        grids: how the arrays are cut, by the names of their folders.
        entries: what they are.
        blocks: what is wanted of them, called by the names of their folders.

    Raises:
        CheckpointError: a chunk is missing or was altered.
    """
    mode = {"open": True, "assume_metadata": True}

    def opened(key: str) -> Any:
        return imported().open(_spec(f"{folder}/{key}", entries[key], grids[key]), **mode)

    fill(opened, folder, blocks)


def fill(opened: Callable[[str], Any], where: str, blocks: Sequence[Block]) -> None:
    """Fill blocks of memory from stores of TensorStore.

    Args:
        opened: opens the store of an array by its name; gives what is to come.
        where: the checkpoint, for messages.
        blocks: what is wanted.

    Raises:
        CheckpointError: a chunk is missing or was altered.
    """
    for batch in _batches(blocks, lambda block: block.out.nbytes):
        stores = {name: opened(name) for name in {block.name for block in batch}}
        reading = []
        for block in batch:
            store = stores[block.name].result()
            bits = block.out.view(store.dtype.numpy_dtype)  # what Zarr has no name for is bits
            reading.append(imported().array(bits).write(store[block.index]))
        for block, one in zip(batch, reading, strict=True):
            try:
                one.result()
            except ValueError as error:
                raise CheckpointError(
                    f"{where}/{block.name} was altered after it was written: {error}"
                ) from None


def imported() -> Any:
    """TensorStore.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import tensorstore
    except ModuleNotFoundError:
        raise ImportError(
            "checkpoints are read and written by TensorStore, which is not installed here; get it "
            f"with {install_command('checkpoint')}"
        ) from None
    return tensorstore


def _spec(folder: str, entry: Entry, grid: Grid) -> dict[str, Any]:
    codec = {"chunk_shape": grid.chunks, "codecs": _SUMMED, "index_codecs": _SUMMED}
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{os.path.abspath(folder)}/"},  # noqa: PTH100
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
        "metadata": {
            "shape": entry.shape,
            "data_type": _stored_name(entry.stored),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": grid.files}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": [{"name": "sharding_indexed", "configuration": codec}],
        },
    }


def _stored_name(dtype: str) -> str:
    """The name of a dtype in Zarr; what it has no name for is stored as its bits."""
    known = np.dtype(jax.numpy.dtype(dtype))
    return dtype if known.kind in "biufc" or dtype == "bfloat16" else f"uint{known.itemsize * 8}"


def _as_stored(host: np.ndarray) -> np.ndarray:
    name = _stored_name(host.dtype.name)
    return host if name == host.dtype.name else host.view(name)


def _ended(writing: Sequence[Any]) -> None:
    for one in writing:
        one.result()


def _batches(items: Any, size: Any) -> Iterator[list[Any]]:
    """Groups of at most `AT_ONCE` bytes, or one item."""
    batch: list[Any] = []
    total = 0
    for item in items:
        if batch and (total + size(item) > AT_ONCE or len(batch) == _MANY):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch
