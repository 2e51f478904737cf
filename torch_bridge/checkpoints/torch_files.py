"""torch's checkpoint files, written to and read from a `Store`.

The format is that of `torch.distributed.checkpoint`, whose `FileSystemReader` reads it as well.
Beside it, checksums are taken of what is written; several threads write, and an error in any of
them is raised; a saved shard is read once, for however many shards that overlap with it.

Of what `FileSystemReader` keeps for its subclasses `storage_data` is used: per saved shard the
file, the offset and the length.
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
    """Passes bytes on, and counts and sums them. Closing it leaves the file open.

    Attributes:
        error: the first that the file raised; torch's zip writer would hide it behind its own.
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
    """A storage, as torch's writer and reader want to see a file system.

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
        """Any path will do."""
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
        name: what the checkpoint calls itself.
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
        """What the checkpoint calls itself: the folder is still a temporary one."""
        return self._name

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of a plan; torch's own threads would lose an error.

        Args:
            plan: of this process.
            planner: gives the data.
        """
        parts = [
            dataclasses.replace(plan, items=items, storage_data=self._prefix(plan, number))
            for number, items in enumerate(_shares(plan.items, self._threads))
        ]
        write = super().write_data
        with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
            done = list(pool.map(lambda part: write(part, planner).wait(), parts))
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for results in done for result in results])
        return future

    @staticmethod
    def _prefix(plan: SavePlan, number: int) -> Any:
        """File names of a thread: `__0_1_0.distcp` for process 0, thread 1."""
        given = plan.storage_data
        return (
            given if not number else dataclasses.replace(given, prefix=f"{given.prefix}{number}_")
        )


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
        """Read the saved shards that a plan names, each once and in the order of the file.

        Args:
            plan: of this process.
            planner: takes the data.
        """
        wanted: dict[str, dict[tuple[int, int], list[Any]]] = {}
        for item in plan.items:
            place: Any = self.storage_data[item.storage_index]
            chunks = wanted.setdefault(place.relative_path, {})
            chunks.setdefault((place.offset, place.length), []).append(item)
        for name, chunks in wanted.items():
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
    """Copy a saved shard to all that overlap with it."""
    if items[0].type == LoadItemType.BYTE_IO:
        for item in items:
            planner.load_bytes(item, io.BytesIO(data))
        return
    saved = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    for item in items:
        part = saved
        for axis, (start, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            part = part.narrow(axis, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(part)
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
