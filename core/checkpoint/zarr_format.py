"""The format of `iso.save`: names and small leaves in `tree.json`, large arrays in `arrays/`.

An array is a folder that any library for Zarr (version 3) opens; TensorStore writes and reads it. A
file has the shard of one device, in chunks with a CRC-32C each (Zarr's `sharding_indexed` and
`crc32c` codecs): a reader with another mesh reads the chunks that it needs, and an altered one is
an error when it is read. Nothing is compressed, as trained weights hardly shrink.

>>> import tempfile
>>> values = {"epoch": Entry.of_value(3), "betas": Entry.of_value((0.9, float("inf")))}
>>> weight = Content.of("w", np.ones((64, 64), np.float32), "float32")
>>> out = np.empty((1, 2), np.float32)
>>> with tempfile.TemporaryDirectory() as root:
...     store = LocalStore(root)
...     files = write(store, "new", {"w": weight}, values, {"tied": "w"}, ProcessGroup())
...     folder = ZarrFolder(store, "new")
...     folder.read([Block("w", (slice(3, 4), slice(3, 5)), out)])
>>> sorted(files), folder.entries["betas"].value, folder.entries["tied"] == folder.entries["w"]
(['arrays/0-w/c.0.0', 'arrays/0-w/zarr.json', 'tree.json'], (0.9, inf), True)
>>> out.tolist()
[[1.0, 1.0]]

Specification: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import os
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from isoshard.core.errors import CheckpointError
from isoshard.core.installation import install_command
from isoshard.core.processes.coordination import ProcessGroup

from .chunk_grid import Grid
from .file_writes import by_file
from .source import Block, Entry
from .store import LocalStore, Sum
from .stored_shards import Content

TREE = "tree.json"
_ARRAYS = "arrays"
_FORMAT = 1
AT_ONCE = 256 << 20
"""Bytes that are being read or written at a time."""
_MANY = 256
_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_SUMMED = [_BYTES, {"name": "crc32c"}]


def write(
    store: LocalStore,
    folder: str,
    contents: Mapping[str, Content],
    values: Mapping[str, Entry],
    same: Mapping[str, str],
    group: ProcessGroup,
) -> dict[str, Sum]:
    """Write all files of a checkpoint but its manifest; their sums, in the first process.

    Args:
        store: of the checkpoints.
        folder: of the new checkpoint.
        contents: the arrays by name, of which a process writes its shards.
        values: numbers and strings by name.
        same: other names of arrays, each with the name that is in `contents`.
        group: the processes that write.
    """
    large = [name for name, content in contents.items() if not content.is_small]
    keys = {name: f"{index}-{_safe(name)}" for index, name in enumerate(large)}
    arrays = {keys[name]: contents[name] for name in large}
    root = store.full_path(f"{folder}/{_ARRAYS}")
    group.broadcast(lambda: store.make_folder(f"{folder}/{_ARRAYS}"))
    group.run(lambda: write_arrays(root, arrays, create=group.rank == 0))
    # Each process takes the sizes of some files: for one alone that is slow on a shared disk.
    files = (f"{folder}/{_ARRAYS}/{file}" for file in files_of(arrays))
    share = itertools.islice(files, group.rank, None, group.size)
    sizes = group.gather(lambda: [_size(store, file) for file in share])

    def finish() -> dict[str, Sum]:
        leaves = {name: _described(content, keys.get(name)) for name, content in contents.items()}
        leaves |= {name: {"value": encoded(entry.value)} for name, entry in values.items()}
        leaves |= {name: {"same": other} for name, other in same.items()}
        with store.writing(f"{folder}/{TREE}") as file:
            file.write(json.dumps({"format": _FORMAT, "leaves": leaves}).encode())
        for name in keys.values():
            store.sync_folder(f"{folder}/{_ARRAYS}/{name}")
        store.sync_folder(f"{folder}/{_ARRAYS}")
        arrays_sums = {
            f"{_ARRAYS}/{file}": Sum(sizes[index % group.size][index // group.size], None)
            for index, file in enumerate(files_of(arrays))
        }
        return {**arrays_sums, TREE: store.sum_of(f"{folder}/{TREE}")}

    sums: dict[str, Sum] = {}
    group.broadcast(lambda: sums.update(finish()))
    return sums


class ZarrFolder:
    """A checkpoint that `write` wrote; a `Source`.

    Args:
        store: of the checkpoints.
        folder: of this one.

    Attributes:
        where: the full path.
        entries: all leaves by name.

    Raises:
        CheckpointError: a later version wrote it.
    """

    def __init__(self, store: LocalStore, folder: str):
        """See the class."""
        self.where = store.full_path(folder)
        self._root = store.full_path(f"{folder}/{_ARRAYS}")
        with store.reading(f"{folder}/{TREE}") as file:
            content = json.loads(file.read())
        if content["format"] != _FORMAT:
            raise CheckpointError(
                f"{self.where} has format {content['format']}, and this version of isoshard reads "
                f"format {_FORMAT}; read it with the version that wrote it"
            )
        leaves: dict[str, dict[str, Any]] = content["leaves"]
        self._leaves = {name: leaves[leaf.get("same", name)] for name, leaf in leaves.items()}
        self.entries: Mapping[str, Entry] = {
            name: _entry(leaf) for name, leaf in self._leaves.items()
        }

    def read(self, blocks: Sequence[Block]) -> None:
        """Fill the memory of all blocks; see `Source`."""
        grids, entries, large = {}, {}, []
        for block in blocks:
            leaf, entry = self._leaves[block.name], self.entries[block.name]
            if "data" in leaf:
                block.out[...] = _unpacked(leaf["data"], entry)[block.index]
                continue
            key = leaf["folder"]
            grids[key] = Grid(tuple(leaf["files"]), tuple(leaf["chunks"]))
            entries[key] = entry
            large.append(dataclasses.replace(block, name=key))
        read_blocks(self._root, grids, entries, large)


def encoded(value: Any) -> Any:
    """A value as JSON has it; what JSON has not becomes a dictionary with one key.

    Example:
        >>> encoded((1, b"ab", 2j))
        {'tuple': [1, {'bytes': 'YWI='}, {'complex': [0.0, 2.0]}]}
    """
    if isinstance(value, tuple):
        return {"tuple": [encoded(item) for item in value]}
    if isinstance(value, list):
        return [encoded(item) for item in value]
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return value


def decoded(value: Any) -> Any:
    """The inverse of `encoded`."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tuple":
        return tuple(decoded(item) for item in inner)
    return base64.b64decode(inner) if kind == "bytes" else complex(*inner)


def _described(content: Content, folder: str | None) -> dict[str, Any]:
    entry = content.entry
    leaf: dict[str, Any] = {"shape": entry.shape, "dtype": entry.dtype, "stored": entry.stored}
    if entry.spec is not None:
        leaf["spec"] = entry.spec
    if entry.impl:
        leaf["impl"] = entry.impl
    if folder is None:
        return leaf | {"data": base64.b64encode(content.full().tobytes()).decode()}
    grid = content.grid()
    return leaf | {"folder": folder, "files": grid.files, "chunks": grid.chunks}


def _entry(leaf: dict[str, Any]) -> Entry:
    if "value" in leaf:
        return Entry.of_value(decoded(leaf["value"]))
    spec = leaf.get("spec")
    return Entry(
        tuple(leaf["shape"]),
        leaf["dtype"],
        leaf["stored"],
        None if spec is None else tuple(map(tuple, spec)),
        impl=leaf.get("impl", ""),
    )


def _unpacked(data: str, entry: Entry) -> np.ndarray:
    return np.frombuffer(base64.b64decode(data), jax.numpy.dtype(entry.stored)).reshape(entry.shape)


def _safe(name: str) -> str:
    return urllib.parse.quote(name, safe="")[:100]


def _size(store: LocalStore, path: str) -> int:
    try:
        return store.size(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{store.full_path(path)} was not written: no process had the shard"
        ) from None


def write_arrays(folder: str, contents: Mapping[str, Content], *, create: bool) -> None:
    """Write this process's shards of arrays; each file is on the disk when this returns.

    Args:
        folder: that exists.
        contents: the arrays by the names of their folders.
        create: write their metadata, which one process does.
    """
    mode: dict[str, Any] = {"create": True} if create else {"open": True, "assume_metadata": True}
    ts = tensorstore()
    for batch in _batches(contents.items(), lambda item: item[1].nbytes):
        grids = {key: content.grid() for key, content in batch}
        opened = [
            (content, ts.open(_spec(f"{folder}/{key}", content.entry, grids[key]), **mode))
            for key, content in batch
        ]
        writing, joined = [], 0
        for content, store in opened:
            for shard in by_file(content.shards(), content.grid(), content.entry.shape):
                bits = _as_stored(shard.host)
                target = store.result()[shard.index]
                writing.append(target.write(bits, can_reference_source_data_indefinitely=True))
                joined += shard.host.nbytes * shard.joined
                if joined > AT_ONCE:
                    _ended(writing)
                    writing, joined = [], 0
            store.result()
        _ended(writing)


def files_of(contents: Mapping[str, Content]) -> Iterator[str]:
    """Every file of arrays that the processes write together, relative to their folder."""
    for key, content in contents.items():
        yield f"{key}/zarr.json"
        for position in itertools.product(*map(range, content.grid().count(content.entry.shape))):
            yield f"{key}/{'.'.join(['c', *map(str, position)])}"


def read_blocks(
    folder: str, grids: Mapping[str, Grid], entries: Mapping[str, Entry], blocks: Sequence[Block]
) -> None:
    """Read blocks of arrays that `write_arrays` wrote; all by the names of their folders.

    Raises:
        CheckpointError: a chunk is missing or was altered.
    """
    mode = {"open": True, "assume_metadata": True}

    def opened(key: str) -> Any:
        return tensorstore().open(_spec(f"{folder}/{key}", entries[key], grids[key]), **mode)

    fill(opened, folder, blocks)


def fill(opened: Callable[[str], Any], where: str, blocks: Sequence[Block]) -> None:
    """Read blocks of arrays by TensorStore.

    Args:
        opened: the future of an array's TensorStore, by its name.
        where: the checkpoint, for messages.
        blocks: to be filled.

    Raises:
        CheckpointError: a chunk is missing or was altered.
    """
    for batch in _batches(blocks, lambda block: block.out.nbytes):
        stores = {name: opened(name) for name in {block.name for block in batch}}
        reading = []
        for block in batch:
            store = stores[block.name].result()
            bits = block.out.view(store.dtype.numpy_dtype)  # what Zarr has no name for is bits
            reading.append(tensorstore().array(bits).write(store[block.index]))
        for block, future in zip(batch, reading, strict=True):
            try:
                future.result()
            except ValueError as error:
                raise CheckpointError(
                    f"{where}/{block.name} was altered after it was written: {error}"
                ) from None


def tensorstore() -> Any:
    """The module TensorStore; an `ImportError` has the command that installs it."""
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
    np_dtype = np.dtype(jax.numpy.dtype(dtype))
    has_name = np_dtype.kind in "biufc" or dtype == "bfloat16"
    return dtype if has_name else f"uint{np_dtype.itemsize * 8}"


def _as_stored(host: np.ndarray) -> np.ndarray:
    name = _stored_name(host.dtype.name)
    return host if name == host.dtype.name else host.view(name)


def _ended(writing: Sequence[Any]) -> None:
    for future in writing:
        future.result()


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
