"""One checkpoint in its folder: the names in `tree.json`, large arrays in `arrays/`.

>>> import tempfile
>>> values = {"epoch": Entry.of_value(3), "betas": Entry.of_value((0.9, float("inf")))}
>>> weight = Content.of("w", np.ones((64, 64), np.float32), "float32")
>>> with tempfile.TemporaryDirectory() as root:
...     store = LocalStore(root)
...     files = write(store, "new", {"w": weight}, values, {"tied": "w"}, ProcessGroup())
...     found = Folder(store, "new")
>>> sorted(files), found.entries["betas"].value, found.entries["tied"] == found.entries["w"]
(['arrays/0-w/c.0.0', 'arrays/0-w/zarr.json', 'tree.json'], (0.9, inf), True)
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from isoshard.core.checkpoint.manifest import Sum, sum_of
from isoshard.core.checkpoint.source import Block, Entry
from isoshard.core.checkpoint.store import LocalStore
from isoshard.core.errors import CheckpointError
from isoshard.core.processes.coordination import ProcessGroup

from . import zarr_arrays
from .chunk_grid import Grid
from .stored_shards import Content

TREE = "tree.json"
_ARRAYS = "arrays"
_FORMAT = 1


def write(
    store: LocalStore,
    folder: str,
    contents: Mapping[str, Content],
    values: Mapping[str, Entry],
    same: Mapping[str, str],
    group: ProcessGroup,
) -> dict[str, Sum]:
    """Write all that a checkpoint consists of but its manifest.

    Args:
        store: of the checkpoints.
        folder: of the new checkpoint.
        contents: the arrays by name.
        values: numbers and strings by name.
        same: names of arrays that stand under another name already, and that.
        group: the processes that write; all must have the same names.

    Returns:
        In the first process every file with its sum; nothing in the others.
    """
    large = [name for name, content in contents.items() if not content.is_small]
    keys = {name: f"{number}-{_safe(name)}" for number, name in enumerate(large)}
    arrays = {keys[name]: contents[name] for name in large}
    root = store.full_path(f"{folder}/{_ARRAYS}")
    group.broadcast(lambda: store.make_folder(f"{folder}/{_ARRAYS}"))
    group.run(lambda: zarr_arrays.write(root, arrays, create=group.rank == 0))
    # Each process looks at some of all files: one alone would ask the storage for a long time.
    files = (f"{folder}/{_ARRAYS}/{file}" for file in zarr_arrays.files_of(arrays))
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
        sums = {
            f"{_ARRAYS}/{file}": Sum(sizes[number % group.size][number // group.size], None)
            for number, file in enumerate(zarr_arrays.files_of(arrays))
        }
        return {**sums, TREE: sum_of(store, f"{folder}/{TREE}")}

    found: dict[str, Sum] = {}
    group.broadcast(lambda: found.update(finish()))
    return found


class Folder:
    """A checkpoint that `write` wrote; a `Source`.

    Args:
        store: of the checkpoints.
        folder: its folder.

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
        zarr_arrays.read(self._root, grids, entries, large)


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


def decoded(found: Any) -> Any:
    """Undo `encoded`."""
    if isinstance(found, list):
        return [decoded(item) for item in found]
    if not isinstance(found, dict):
        return found
    ((kind, inner),) = found.items()
    if kind == "tuple":
        return tuple(decoded(item) for item in inner)
    return base64.b64decode(inner) if kind == "bytes" else complex(*inner)


def _described(content: Content, folder: str | None) -> dict[str, Any]:
    entry = content.entry
    found: dict[str, Any] = {"shape": entry.shape, "dtype": entry.dtype, "stored": entry.stored}
    if entry.spec is not None:
        found["spec"] = entry.spec
    if entry.impl:
        found["impl"] = entry.impl
    if folder is None:
        return found | {"data": base64.b64encode(content.whole().tobytes()).decode()}
    grid = content.grid()
    return found | {"folder": folder, "files": grid.files, "chunks": grid.chunks}


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
            f"{store.full_path(path)} was not written: no process had the piece"
        ) from None
