"""torch's checkpoint files, written to and read from a `Store`.

The format is that of `torch.distributed.checkpoint`, whose `FileSystemReader` reads it as well. In
addition, checksums are computed while writing; several threads write, and an error in any of them
is raised; a saved shard is read once, for all shards that overlap with it.

Of torch's `FileSystemReader` the attribute `storage_data` is used: for each saved shard its file,
offset and length.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import io
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import (
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.futures import Future

from isoshard.core.checkpoint.store import Store, Sum
from isoshard.torch_bridge._torch_internals.checkpoint_types import LoadItemType, WriteResult

from .load_planner import SPMDLoadPlanner


class _Summed(io.RawIOBase):
    """Writes to a file, counts the bytes and computes a checksum. Closing it leaves the file open.

    Attributes:
        error: the first error of the file, as torch's zip writer raises another one in its place.
    """

    def __init__(self, file: BinaryIO):
        super().__init__()
        self._file = file
        self.size = 0
        self.crc32 = 0
        self.error: Exception | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        block = memoryview(data).cast("B")
        try:
            self._file.write(block)
        except Exception as error:
            self.error = self.error or error
            raise
        self.size += block.nbytes
        self.crc32 = zlib.crc32(block, self.crc32)
        return block.nbytes

    def tell(self) -> int:
        return self.size


class Files(FileSystemBase):
    """A `Store` as the file system of torch's writer and reader.

    Attributes:
        sums: of the files written through it, by name.
    """

    def __init__(self, store: Store):
        """Use `storage`."""
        self._store = store
        self.sums: dict[str, Sum] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file."""
        if mode == "rb":
            with self._store.reading(os.fspath(path)) as file:
                yield file
            return
        with self._store.writing(os.fspath(path)) as file:
            summed = _Summed(file)
            try:
                yield summed
            except Exception:
                if summed.error is not None:
                    raise summed.error from None
                raise
        self.sums[_name(path)] = Sum(summed.size, summed.crc32)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """A file of a folder."""
        return f"{os.fspath(path)}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        """The path itself."""
        return os.fspath(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file."""
        self._store.rename(os.fspath(path), os.fspath(new_path))
        self.sums[_name(new_path)] = self.sums.pop(_name(path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a folder."""
        self._store.make_folder(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True: any path is valid."""
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether there is such a file."""
        return self._store.exists(os.fspath(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file."""
        self._store.remove(os.fspath(path))


class Writer(FileSystemWriter):
    """Writes one checkpoint.

    Args:
        files: where, and what takes the sums.
        folder: into which folder.
        threads: that write, each a file of its own.
        name: of the checkpoint, while its folder is a temporary one.
    """

    def __init__(self, files: Files, folder: str, threads: int, name: str):
        """See the class."""
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.fs: Any = files
        self.path = folder
        self._threads = threads
        self._name = name

    @property
    def checkpoint_id(self) -> str:
        """The name of the checkpoint: its folder is still a temporary one."""
        return self._name

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of a plan; torch's own threads would lose an error."""
        plans = [
            dataclasses.replace(plan, items=items, storage_data=self._prefix(plan, thread))
            for thread, items in enumerate(_shares(plan.items, self._threads))
        ]
        write = super().write_data
        with concurrent.futures.ThreadPoolExecutor(len(plans)) as pool:
            done = list(pool.map(lambda thread_plan: write(thread_plan, planner).wait(), plans))
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for results in done for result in results])
        return future

    @staticmethod
    def _prefix(plan: SavePlan, thread: int) -> Any:
        """File names of a thread: `__0_1_0.distcp` for process 0, thread 1."""
        storage_data = plan.storage_data
        if not thread:
            return storage_data
        return dataclasses.replace(storage_data, prefix=f"{storage_data.prefix}{thread}_")


class Reader(FileSystemReader):
    """Reads one checkpoint.

    Args:
        files: where.
        folder: its folder.
    """

    def __init__(self, files: Files, folder: str):
        """See the class."""
        super().__init__(folder)
        self.fs: Any = files
        self.path = folder

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the saved shards that a plan names, each once and in the order of the file."""
        chunks_by_file: dict[str, dict[tuple[int, int], list[Any]]] = {}
        for item in plan.items:
            info: Any = self.storage_data[item.storage_index]
            chunks = chunks_by_file.setdefault(info.relative_path, {})
            chunks.setdefault((info.offset, info.length), []).append(item)
        for name, chunks in chunks_by_file.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
                for (offset, length), items in sorted(chunks.items()):
                    stream.seek(offset)
                    _deliver(stream.read(length), items, planner)
        if isinstance(planner, SPMDLoadPlanner):
            planner.check_complete()
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _deliver(data: bytes, items: Sequence[Any], planner: LoadPlanner) -> None:
    """Copy a saved shard to all shards that overlap with it."""
    if items[0].type == LoadItemType.BYTE_IO:
        for item in items:
            planner.load_bytes(item, io.BytesIO(data))
        return
    saved = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    for item in items:
        overlap = saved
        for axis, (start, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            overlap = overlap.narrow(axis, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(overlap)
        planner.commit_tensor(item, target)


def _shares(items: Sequence[WriteItem], count: int) -> list[list[WriteItem]]:
    """Divide items into at most `count` groups of about the same number of bytes."""
    groups: list[list[WriteItem]] = [[] for _ in range(max(1, min(count, len(items))))]
    sizes = [0] * len(groups)
    for item in sorted(items, key=_bytes, reverse=True):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(item)
        sizes[smallest] += max(_bytes(item), 1)
    return groups


def _bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _name(path: str | os.PathLike[str]) -> str:
    return os.fspath(path).rsplit("/", 1)[-1]
