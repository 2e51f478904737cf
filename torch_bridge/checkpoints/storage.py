"""Where checkpoints lie: a folder of this machine, or one that fsspec knows.

A storage is told relative paths. It promises that a file, once closed, is kept: on a local disk it
is synced. `atomic` says whether a folder can be renamed in one step that a crash cannot split.

>>> storage = storage_at("checkpoints")
>>> storage.make_folder("a")
>>> with storage.writing("a/b") as file:
...     _ = file.write(b"kept")
>>> storage.names("a"), storage.atomic
(['b'], True)
>>> storage_at("memory://checkpoints").atomic
False
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

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


class RemoteStorage:
    """A folder that fsspec knows.

    Args:
        files: an `fsspec.AbstractFileSystem`.
        root: the folder's path there.
    """

    atomic = False

    def __init__(self, files: Any, root: str):
        """See the class."""
        self._files = files
        self.root = root.rstrip("/")

    def where(self, path: str) -> str:
        """The full path, with its protocol."""
        return self._files.unstrip_protocol(self._at(path))

    def names(self, path: str) -> list[str]:
        """What a folder holds, sorted; nothing if there is no such folder."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._at(path), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        own = self._at(path).strip("/")
        return sorted(
            {name.rstrip("/").rsplit("/", 1)[-1] for name in found if name.strip("/") != own}
        )

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        return self._files.exists(self._at(path))

    def is_folder(self, path: str) -> bool:
        """Whether there is such a folder."""
        return self._files.isdir(self._at(path))

    def make_folder(self, path: str) -> None:
        """Make a folder, where the storage has folders."""
        self._files.makedirs(self._at(path), exist_ok=True)

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """Make a file; when the context ends without an error it is kept."""
        with self._files.open(self._at(path), "wb") as file:
            yield file

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[BinaryIO]:
        """Open a file."""
        with self._files.open(self._at(path), "rb") as file:
            yield file

    def rename(self, old: str, new: str) -> None:
        """Rename a file: most storages copy it and remove the old one."""
        self._files.mv(self._at(old), self._at(new))

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._files.rm_file(self._at(path))

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder; many storages drop it with its last file."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rmdir(self._at(path))

    def keep_names(self, path: str) -> None:
        """Nothing to do: a file that is closed is kept, with its name."""

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root


def storage_at(path: str | os.PathLike[str]) -> LocalStorage | RemoteStorage:
    """The storage behind a path.

    Args:
        path: a folder of this machine, or a URL such as `"gs://bucket/run"` of a protocol whose
            fsspec package is installed; `"file://"` is this machine.
    """
    text = os.fspath(path)
    if "://" not in text and "::" not in text:
        return LocalStorage(text)
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    files, root = url_to_fs(text)
    return LocalStorage(root) if isinstance(files, LocalFileSystem) else RemoteStorage(files, root)


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
