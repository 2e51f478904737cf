"""Stores of checkpoints: a folder of this machine, or one that fsspec reaches.

Paths are relative to the store's root. A file is durable once it is closed: on a local disk it is
synced. `atomic` is whether a folder is renamed in one step, which a crash cannot interrupt.

>>> store = LocalStore("checkpoints")
>>> store.make_folder("a")
>>> with store.writing("a/b") as file:
...     _ = file.write(b"durable")
>>> store.names("a"), store.atomic
(['b'], True)
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import errno
import fcntl
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

_BUFFER = 1 << 20
_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class Sum:
    """What a file must be.

    Attributes:
        size: in bytes.
        crc32: of its bytes; None if the file has checksums of its own, which are compared when it
            is read.
    """

    size: int
    crc32: int | None


class Store(abc.ABC):
    """What checkpoints need of a file system.

    Attributes:
        root: the folder, as the file system calls it.
        atomic: whether `rename` takes folders, in one step.
    """

    root: str
    atomic: bool

    @abc.abstractmethod
    def full_path(self, path: str) -> str:
        """The full path, for messages."""

    @abc.abstractmethod
    def names(self, path: str) -> list[str]:
        """The sorted names in a folder; none if there is no such folder."""

    @abc.abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""

    @abc.abstractmethod
    def is_folder(self, path: str) -> bool:
        """Whether there is such a folder."""

    @abc.abstractmethod
    def size(self, path: str) -> int:
        """Bytes of a file."""

    @abc.abstractmethod
    def make_folder(self, path: str) -> None:
        """Create a folder and its parents, where they are missing."""

    @abc.abstractmethod
    def writing(self, path: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Create a file; it is durable when the context ends without an error."""

    @abc.abstractmethod
    def reading(self, path: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Open a file."""

    @abc.abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Rename a file or (if `atomic`) a folder; a file or an empty folder is replaced."""

    @abc.abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file."""

    @abc.abstractmethod
    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""

    @abc.abstractmethod
    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""

    def sum_of(self, path: str) -> Sum:
        """The size and checksum of a file, which is read."""
        size = crc = 0
        with self.reading(path) as file:
            while block := file.read(_CHUNK):
                size += len(block)
                crc = zlib.crc32(block, crc)
        return Sum(size, crc)

    def remove_tree(self, path: str, *, last: str | None = None) -> None:
        """Remove a folder with its content; what another process has removed is no error.

        Args:
            path: the folder.
            last: a file in it that is removed after all others.
        """
        for name in sorted(self.names(path), key=lambda name: name == last):
            inner = f"{path}/{name}"
            if self.is_folder(inner):
                self.remove_tree(inner)
            else:
                with contextlib.suppress(FileNotFoundError):
                    self.remove(inner)
        with contextlib.suppress(FileNotFoundError):
            self.remove_folder(path)


class LocalStore(Store):
    """A folder of this machine, or of a file system that is mounted on it.

    Args:
        root: its path; `make_folder("")` creates it.
    """

    atomic = True

    def __init__(self, root: str):
        """See the class."""
        self.root = root

    def full_path(self, path: str) -> str:
        """The full path."""
        return str(self._at(path))

    def names(self, path: str) -> list[str]:
        """The sorted names in a folder."""
        try:
            return sorted(os.listdir(self._at(path)))  # noqa: PTH208 (names, not paths)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        return self._at(path).exists()

    def is_folder(self, path: str) -> bool:
        """Whether there is such a folder."""
        return self._at(path).is_dir()

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return self._at(path).stat().st_size

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents."""
        self._at(path).mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """Create a file, and sync it."""
        with io.BufferedWriter(self._open(self._at(path)), _BUFFER) as file:
            yield cast(BinaryIO, file)
            file.flush()
            self._sync(file.fileno())

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[BinaryIO]:
        """Open a file."""
        with self._at(path).open("rb") as file:
            yield file

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder."""
        self._at(old).rename(self._at(new))

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._at(path).unlink()

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        self._at(path).rmdir()

    def sync_folder(self, path: str) -> None:
        """Sync the directory: POSIX keeps a new name only then."""
        with self._opened(path) as descriptor:
            self._sync(descriptor)

    @contextlib.contextmanager
    def locked(self, path: str) -> Iterator[bool | None]:
        """Take the lock of a folder; the kernel frees it when the process ends, however it ends.

        Yields:
            True; False if another process has it; None if this file system has no locks.
        """
        with self._opened(path) as descriptor:
            yield _lock(descriptor)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        descriptor = os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _at(self, path: str) -> Path:
        return Path(self.root, path)

    def _open(self, path: Path) -> io.RawIOBase:
        return io.FileIO(path, "wb")

    def _sync(self, descriptor: int) -> None:
        os.fsync(descriptor)


class FsspecStore(Store):
    """A folder of a file system of fsspec, such as a bucket.

    Args:
        files: an `fsspec.AbstractFileSystem`.
        root: the folder's path there.
    """

    atomic = False

    def __init__(self, files: Any, root: str):
        """See the class."""
        self._files = files
        self.root = root.rstrip("/")

    def full_path(self, path: str) -> str:
        """The full path, with its protocol."""
        return self._files.unstrip_protocol(self._at(path))

    def names(self, path: str) -> list[str]:
        """The sorted names in a folder."""
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._at(path), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        folder_name = self._at(path).strip("/")  # some file systems list the folder itself
        return sorted(
            {
                name.rstrip("/").rsplit("/", 1)[-1]
                for name in paths
                if name.strip("/") != folder_name
            }
        )

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        return self._files.exists(self._at(path))

    def is_folder(self, path: str) -> bool:
        """Whether there is such a folder."""
        return self._files.isdir(self._at(path))

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return self._files.size(self._at(path))

    def make_folder(self, path: str) -> None:
        """Create a folder, where the file system has folders."""
        self._files.makedirs(self._at(path), exist_ok=True)

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """Create a file."""
        with self._files.open(self._at(path), "wb") as file:
            yield file

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[BinaryIO]:
        """Open a file."""
        with self._files.open(self._at(path), "rb") as file:
            yield file

    def rename(self, old: str, new: str) -> None:
        """Rename a file: most file systems copy it and remove the old one."""
        self._files.mv(self._at(old), self._at(new))

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._files.rm_file(self._at(path))

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder; many file systems drop it with its last file."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rmdir(self._at(path))

    def sync_folder(self, path: str) -> None:
        """Nothing to do: a closed file is durable, with its name."""

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root


def local(path: str | os.PathLike[str]) -> str:
    """A path of this machine, or of a file system that is mounted on it.

    Raises:
        ValueError: it is a URL.
    """
    text = os.fspath(path)
    if "://" in text:
        raise ValueError(
            f"{text} is a URL, and iso.save and iso.restore take a folder; mount the storage, or "
            "use isoshard.torch_bridge.checkpoints.CheckpointManager, which takes URLs for fsspec"
        )
    return text


def _lock(descriptor: int) -> bool | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            return None
        raise
    return True
