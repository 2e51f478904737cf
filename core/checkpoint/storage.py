"""Where checkpoints lie: what they need of a file system, and a folder of this machine.

A storage is told relative paths. It promises that a file, once closed, is kept: on a local disk it
is synced. `atomic` says whether a folder can be renamed in one step that a crash cannot split.

>>> storage = LocalStorage("checkpoints")
>>> storage.make_folder("a")
>>> with storage.writing("a/b") as file:
...     _ = file.write(b"kept")
>>> storage.names("a"), storage.atomic
(['b'], True)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, cast

_BUFFER = 1 << 20


class Storage(Protocol):
    """What checkpoints need of a file system; all paths are relative to `root`."""

    root: str
    atomic: bool

    def where(self, path: str) -> str:
        """The full path, for messages."""
        ...

    def names(self, path: str) -> list[str]:
        """What a folder holds, sorted; nothing if there is no such folder."""
        ...

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        ...

    def is_folder(self, path: str) -> bool:
        """Whether there is such a folder."""
        ...

    def size(self, path: str) -> int:
        """Of a file, in bytes."""
        ...

    def make_folder(self, path: str) -> None:
        """Make a folder and those above it; one that is there stays."""
        ...

    def writing(self, path: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Make a file; when the context ends without an error it is kept."""
        ...

    def reading(self, path: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Open a file."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename a file or (if `atomic`) a folder."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file."""
        ...

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        ...

    def keep_names(self, path: str) -> None:
        """Make sure that the names in a folder outlive a crash."""
        ...


def local(path: str | os.PathLike[str]) -> str:
    """A path of this machine, or of a file system that is mounted on it.

    Args:
        path: as the user gave it.

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


class LocalStorage:
    """A folder of this machine.

    Args:
        root: its path; `make_folder("")` makes it.
    """

    atomic = True

    def __init__(self, root: str):
        """See the class."""
        self.root = root

    def where(self, path: str) -> str:
        """The full path."""
        return str(self._at(path))

    def names(self, path: str) -> list[str]:
        """What a folder holds, sorted; nothing if there is no such folder."""
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
        """Of a file, in bytes."""
        return self._at(path).stat().st_size

    def make_folder(self, path: str) -> None:
        """Make a folder and those above it; one that is there stays."""
        self._at(path).mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """Make a file; when the context ends without an error it is on the disk."""
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
        """Rename a file or folder; a file or an empty folder of the new name is replaced."""
        self._at(old).rename(self._at(new))

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._at(path).unlink()

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        self._at(path).rmdir()

    def keep_names(self, path: str) -> None:
        """Write the names in a folder to the disk."""
        with self._opened(path) as number:
            self._sync(number)

    @contextlib.contextmanager
    def claimed(self, path: str) -> Iterator[bool | None]:
        """Hold the lock of a folder; it ends with the process, however that ends.

        Yields:
            True; False if someone else holds it; None if this file system has no locks.
        """
        with self._opened(path) as number:
            yield _lock(number)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        number = os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield number
        finally:
            os.close(number)

    def _at(self, path: str) -> Path:
        return Path(self.root, path)

    def _open(self, path: Path) -> io.RawIOBase:
        return io.FileIO(path, "wb")

    def _sync(self, number: int) -> None:
        os.fsync(number)


def _lock(number: int) -> bool | None:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            return None
        raise
    return True


def remove_tree(storage: Storage, path: str, *, last: str | None = None) -> None:
    """Remove a folder with all it holds; what somebody else has removed meanwhile is no error.

    Args:
        storage: where.
        path: the folder.
        last: a file in it that goes last.
    """
    for name in sorted(storage.names(path), key=lambda name: name == last):
        inner = f"{path}/{name}"
        if storage.is_folder(inner):
            remove_tree(storage, inner)
        else:
            with contextlib.suppress(FileNotFoundError):
                storage.remove(inner)
    with contextlib.suppress(FileNotFoundError):
        storage.remove_folder(path)
