"""Where checkpoints lie: a folder of this machine, or one that fsspec knows.

>>> storage_at("checkpoints").atomic, storage_at("memory://checkpoints").atomic
(True, False)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from isoshard.core.checkpoint.storage import LocalStorage, Storage, remove_tree

__all__ = ["LocalStorage", "RemoteStorage", "Storage", "remove_tree", "storage_at"]


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

    def size(self, path: str) -> int:
        """Of a file, in bytes."""
        return self._files.size(self._at(path))

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
