"""The data: the bytes of the Python standard library's own source files.

They are on every machine that can run this. Files, not bytes, are divided: about one in ten, picked
by a checksum of its path, is for validation, and is never trained on.

>>> is_validation("argparse.py"), is_validation("calendar.py")
(False, True)
>>> corpus = Corpus(np.arange(100, dtype=np.uint8), np.arange(50, dtype=np.uint8), 1, 1)
>>> tokens, targets = corpus.training_batch(0, batch=2, length=4)
>>> tokens.shape, bool((targets == tokens + 1).all())
((2, 4), True)

A batch is a function of its number, so that every framework sees the same ones.
"""

from __future__ import annotations

import dataclasses
import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_VALIDATION_ONE_IN = 10
_SKIP = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})

Batch = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Source text as bytes.

    Attributes:
        train: uint8, the training files one after the other.
        validation: uint8, likewise.
        train_files: how many files that was.
        validation_files: likewise.
    """

    train: np.ndarray
    validation: np.ndarray
    train_files: int
    validation_files: int

    def training_batch(self, index: int, *, batch: int, length: int) -> Batch:
        """Draw windows of the training text at random places.

        Args:
            index: of the batch; the same number gives the same windows.
            batch: windows in a batch.
            length: bytes in a window.

        Returns:
            Tokens and targets, both int64 of shape `(batch, length)`; a target is the byte that
            follows its token.
        """
        starts = np.random.default_rng(index).integers(len(self.train) - length, size=batch)
        return _windows(self.train, starts, length)

    def validation_batches(self, count: int, *, batch: int, length: int) -> Iterator[Batch]:
        """Cut windows out of the validation text, evenly spread over it.

        Args:
            count: batches.
            batch: windows in a batch.
            length: bytes in a window.

        Yields:
            Tokens and targets, as `training_batch` gives them.
        """
        last = len(self.validation) - length - 1
        for starts in np.linspace(0, last, count * batch).astype(np.int64).reshape(count, batch):
            yield _windows(self.validation, starts, length)


def load(folder: Path | None = None) -> Corpus:
    """Read every `.py` file below a folder, and divide them.

    Args:
        folder: by default that of the running Python's standard library; its tests, and packages
            installed into it, are left out.

    Returns:
        The corpus, the same at every call.

    Raises:
        FileNotFoundError: there are too few files to divide.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    chunks: dict[bool, list[bytes]] = {False: [], True: []}
    for path in _sources(folder):
        chunks[is_validation(path.relative_to(folder).as_posix())].append(path.read_bytes() + b"\n")
    if not chunks[False] or not chunks[True]:
        raise FileNotFoundError(
            f"the demo learns from the .py files of Python's standard library, but {folder} has "
            f"{sum(map(len, chunks.values()))} of them: install Python with its sources"
        )
    train, validation = (np.frombuffer(b"".join(chunks[kind]), np.uint8) for kind in (False, True))
    return Corpus(train, validation, len(chunks[False]), len(chunks[True]))


def is_validation(path: str) -> bool:
    """Tell by its path, relative to the library and with `/`, where a file belongs."""
    return zlib.crc32(path.encode()) % _VALIDATION_ONE_IN == 0


def _sources(folder: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - _SKIP)
        yield from (Path(directory) / name for name in sorted(files) if name.endswith(".py"))


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> Batch:
    windows = text[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
