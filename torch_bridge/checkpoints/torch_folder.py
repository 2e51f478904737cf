"""Folders of `torch.distributed.checkpoint` for `iso.save` and `iso.restore`.

Of torch's storage `storage_data` is used, as in `files`: per saved shard the file, the offset and
the length. A saved shard is read once, for however many blocks that overlap with it. torch keeps
metadata as a pickle, which may run code: open only folders that you trust.

>>> import isoshard as iso, tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = iso.save(folder, {"model": {"w": torch.ones(4, dtype=torch.int64)}}, format="torch")
...     opened(f"{folder}/0").entries["model.w"].dtype
'int64'
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from isoshard.core.checkpoint.source import Block, Entry
from isoshard.core.checkpoint.store import LocalStore, Sum
from isoshard.core.errors import CheckpointError
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.processes.coordination import ProcessGroup
from isoshard.torch_bridge._torch_internals.checkpoint_types import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
)
from isoshard.torch_bridge.common.dtypes import logical_dtype, numpy_dtype
from isoshard.torch_bridge.common.exchange import from_numpy, to_numpy
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values.value import Aval, Value

from . import protocol

_METADATA = ".metadata"


def opened(path: str) -> TorchFolder | None:
    """Open a folder.

    Args:
        path: of the folder.

    Returns:
        Its contents; None if torch did not write it.

    Raises:
        CheckpointError: its metadata cannot be read.
    """
    return TorchFolder(path) if (Path(path) / _METADATA).exists() else None


def write(root: str, folder: str, leaves: Mapping[str, Any]) -> dict[str, Sum]:
    """Write leaves into a folder.

    Args:
        root: where the folder is.
        folder: its name.
        leaves: pairs by name: an array with the name of its logical dtype, or another value.
    """
    state = {name: _tensor(value, dtype) for name, (value, dtype) in leaves.items()}
    return protocol.write(LocalStore(root), folder, state, ProcessGroup(), 1, folder)


class TorchFolder:
    """A folder of `torch.distributed.checkpoint`; a `Source`.

    Args:
        path: of the folder.

    Attributes:
        where: the path.
        entries: all leaves by name. The value of one that cannot be unpickled safely is a
            `CheckpointError` that says so.

    Raises:
        CheckpointError: its metadata cannot be read.
    """

    def __init__(self, path: str):
        """See the class."""
        self.where = path
        try:
            result = FileSystemReader(path).read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError) as error:
            raise CheckpointError(f"{path}/{_METADATA} cannot be read: {error}") from error
        self._metadata_of: dict[str, Any] = result.state_dict_metadata
        self._locations: Mapping[Any, Any] = result.storage_data or {}
        self.entries: Mapping[str, Entry] = {
            name: self._entry(name, metadata) for name, metadata in self._metadata_of.items()
        }

    def read(self, blocks: Sequence[Block]) -> None:
        """Fill the memory of all blocks; see `Source`."""
        users_by_location: dict[tuple[str, int, int], list[tuple[Block, ChunkStorageMetadata]]] = {}
        filled = {id(block): 0 for block in blocks}
        for block in blocks:
            for chunk in self._metadata_of[block.name].chunks:
                if _overlap(block.index, chunk) is not None:
                    location = self._location(block.name, chunk.offsets)
                    users_by_location.setdefault(location, []).append((block, chunk))
        for location, users in sorted(users_by_location.items(), key=lambda item: item[0]):
            saved = to_numpy(self._load(location))
            for block, chunk in users:
                inside = _overlap(block.index, chunk)
                assert inside is not None
                in_shard, in_block = inside
                block.out[in_block] = saved[in_shard]
                filled[id(block)] += block.out[in_block].size
        short = sorted({block.name for block in blocks if filled[id(block)] != block.out.size})
        if short:
            raise CheckpointError(
                f"{self.where} has only some elements of these tensors: {', '.join(short)}"
            )

    def _entry(self, name: str, metadata: Any) -> Entry:
        if isinstance(metadata, TensorStorageMetadata):
            dtype = numpy_dtype(metadata.properties.dtype).name
            return Entry(tuple(metadata.size), dtype, dtype)
        assert isinstance(metadata, BytesStorageMetadata)
        try:
            return Entry.of_value(self._load(self._location(name, None)))
        except pickle.UnpicklingError as error:
            first = str(error).partition("\n")[0]
            return Entry.of_value(
                CheckpointError(f"a pickled object that is not loaded by default: {first}")
            )

    def _location(self, name: str, offsets: Any) -> tuple[str, int, int]:
        info = self._locations.get(MetadataIndex(name, offsets))
        if info is None:
            raise CheckpointError(f"{self.where} has no location of {name}")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{name} in {self.where} was written through transforms (compression, ..); read "
                "it with torch.distributed.checkpoint"
            )
        return info.relative_path, info.offset, info.length

    def _load(self, location: tuple[str, int, int]) -> Any:
        file, offset, length = location
        path = Path(self.where) / file
        try:
            with path.open("rb") as opened:
                opened.seek(offset)
                data = opened.read(length)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        if len(data) != length:
            raise CheckpointError(f"{path} ends {length - len(data)} bytes too early")
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError) as error:
            raise CheckpointError(f"{path} was altered after it was written: {error}") from error


def _overlap(
    index: tuple[slice, ...], chunk: ChunkStorageMetadata
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The overlap of a block and a saved shard, as indices into the shard and into the block."""
    in_shard, in_block = [], []
    for axis, offset, size in zip(index, chunk.offsets, chunk.sizes, strict=True):
        low, high = max(axis.start, offset), min(axis.stop, offset + size)
        if low >= high:
            return None
        in_shard.append(slice(low - offset, high - offset))
        in_block.append(slice(low - axis.start, high - axis.start))
    return tuple(in_shard), tuple(in_block)


def _tensor(value: Any, dtype: str) -> Any:
    """An array as the tensor that is saved; other values as they are."""
    if isinstance(value, np.ndarray):
        return from_numpy(value, logical_dtype(jax.numpy.dtype(dtype)))
    if isinstance(value, jax.Array | UnevenArray):
        aval = Aval.contiguous(tuple(value.shape), logical_dtype(jax.numpy.dtype(dtype)))
        return lazy_tensor.fresh(aval, Value.of(value, shared=True))
    return value
