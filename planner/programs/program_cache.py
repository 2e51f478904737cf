"""Compiled programs' texts and numbers on disk, so that a step is compiled once.

One file for each program, under `$ISOSHARD_PLAN_CACHE`, else `$XDG_CACHE_HOME/isoshard/plan`, else
`~/.cache/isoshard/plan`. A file is written whole or not at all; those used longest ago go when
there are too many bytes.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

VARIABLE = "ISOSHARD_PLAN_CACHE"
LIMIT = 1 << 30
"""Bytes that the cache holds at most."""


class ProgramCache:
    """A folder of compiled programs.

    Args:
        folder: where; None is the user's cache.
        limit: bytes that it holds at most.

    Example:
        >>> cache = ProgramCache(Path(tempfile.mkdtemp()))
        >>> cache.put("key", {"text": "HloModule"})
        >>> cache.get("key"), cache.get("other")
        ({'text': 'HloModule'}, None)
    """

    def __init__(self, folder: Path | str | None = None, limit: int = LIMIT):
        """Name a folder; it is made when something is put there."""
        self.folder = Path(folder) if folder is not None else default_folder()
        self.limit = limit

    def get(self, key: str) -> dict[str, Any] | None:
        """What was put there; None if nothing was, or the file is damaged.

        Args:
            key: of it.
        """
        path = self._path(key)
        try:
            with gzip.open(path, "rt") as file:
                found = json.load(file)
            os.utime(path)
        except (OSError, EOFError, ValueError):
            return None
        return found

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Store a value.

        Args:
            key: under which.
            value: of what JSON has.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as raw:
                with gzip.open(raw, "wt", compresslevel=3) as file:
                    json.dump(value, file)
            Path(name).replace(self._path(key))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._shrink()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json.gz"

    def _shrink(self) -> None:
        """Remove what was used longest ago until the rest fits."""
        known = []
        for path in self.folder.glob("*.json.gz"):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                stat = path.stat()
                known.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in known)
        for _, size, path in sorted(known, key=lambda one: one[0])[:-1]:
            if total <= self.limit:
                return
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            total -= size


def default_folder() -> Path:
    """The folder that is used if none is named."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "isoshard" / "plan"
