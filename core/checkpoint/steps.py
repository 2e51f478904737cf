"""The checkpoints in a folder: one per step, each complete or absent.

A checkpoint is the folder `<step>` with a manifest in it. On a disk it is written into a folder of
another name, which is then renamed: that is the commit. Other storages cannot rename a folder;
there it is written in place, with the mark `.saving`, and the manifest, written last, commits.

A step that is saved again gets the folder `<step>.1` (`.2`, ..). The highest number counts, and
the others are removed once it is committed; a disk then renames it to `<step>`. So at any moment
every step has a complete checkpoint, however the process ends.

>>> steps = Steps(LocalStore("run"))
>>> with steps.saving(10) as new:
...     with steps.store.writing(f"{new}/data") as file:
...         _ = file.write(b"abc")
...     print(steps.all())
...     _ = steps.commit(new, 10, {"data": Sum(3, 0x352441C2)})
[]
>>> steps.all(), steps.folder(10)
([10], '10')
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import uuid
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

from isoshard.core.errors import CheckpointError

from .store import LocalStore, Store, Sum

MANIFEST = ".manifest"
"""The manifest's file name."""

_FORMAT = 1
_FOLDER = re.compile(r"(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?")
_MARK = ".saving"
TEMPORARY = ".saving-"
_DOOMED = ".removing-"
_TORCH_XLA = ".manager_metadata"
"""What torch_xla's manager writes last."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint: a line of JSON, and a line with its checksum.

    >>> manifest = Manifest(step=5, order=1, files={"a.distcp": Sum(3, 0x352441C2)})
    >>> print(manifest.to_bytes().decode(), end="")
    {"files": {"a.distcp": {"crc32": "352441c2", "size": 3}}, "format": 1, "order": 1, "step": 5}
    f39efc46
    >>> Manifest.from_bytes(manifest.to_bytes(), "5/.manifest") == manifest
    True

    Attributes:
        step: at which it was taken.
        order: larger than that of every checkpoint committed before it.
        files: every other file of its folder.
    """

    step: int
    order: int
    files: dict[str, Sum]

    def to_bytes(self) -> bytes:
        """The bytes of the file."""
        content = {
            "format": _FORMAT,
            "step": self.step,
            "order": self.order,
            "files": {
                name: {"size": sum.size, "crc32": None if sum.crc32 is None else f"{sum.crc32:08x}"}
                for name, sum in self.files.items()
            },
        }
        line = json.dumps(content, sort_keys=True).encode() + b"\n"
        return line + _signature(line)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Read a manifest.

        Args:
            data: the file's bytes.
            where: its path, for messages.

        Raises:
            CheckpointError: they were altered, or written by a later version.
        """
        line, end, rest = data.partition(b"\n")
        if not end or rest != _signature(line + end):
            raise CheckpointError(
                f"{where} was truncated or altered: its last line is not the checksum of the "
                "first. This checkpoint cannot be trusted; restore another step."
            )
        content: dict[str, Any] = json.loads(line)
        if content["format"] != _FORMAT:
            raise CheckpointError(
                f"{where} has format {content['format']}, and this version of isoshard reads "
                f"format {_FORMAT}; read it with the version that wrote it"
            )
        files = {
            name: Sum(file["size"], file["crc32"] and int(file["crc32"], 16))
            for name, file in content["files"].items()
        }
        return cls(content["step"], content["order"], files)


class Steps:
    """The checkpoints in a folder.

    Args:
        store: the folder.
    """

    def __init__(self, store: Store):
        """See the class."""
        self.store = store
        self._tidied = False

    def all(self) -> list[int]:
        """Every step that has a complete checkpoint, in order."""
        return sorted(self._folders())

    def latest(self) -> int | None:
        """The step whose checkpoint was committed last; None if there is no checkpoint.

        Raises:
            CheckpointError: a manifest was truncated or altered, so that the newest is unknown.
        """
        manifests = [(self.manifest(folder), _step(folder)) for folder in self._newest()]
        orders = [(manifest.order if manifest else 0, step) for manifest, step in manifests]
        return max(orders)[1] if orders else None

    def folder(self, step: int) -> str:
        """The folder of a step's checkpoint.

        Raises:
            CheckpointError: it has none.
        """
        folders = self._folders().get(step)
        if not folders:
            raise CheckpointError(
                f"there is no checkpoint of step {step} in {self.store.full_path('')}; there are "
                f"those of steps {self.all()}"
            )
        return folders[-1]

    def manifest(self, folder: str) -> Manifest | None:
        """The manifest of a checkpoint; None if torch_xla wrote it, which makes none.

        Raises:
            CheckpointError: it was truncated or altered.
        """
        path = f"{folder}/{MANIFEST}"
        if not self.store.exists(path):
            return None
        with self.store.reading(path) as file:
            return Manifest.from_bytes(file.read(), self.store.full_path(path))

    def check(self, folder: str, files: dict[str, Sum]) -> list[str]:
        """Errors of a checkpoint's files, one for each that is not as it was written."""
        errors = []
        for name, sum in files.items():
            path = f"{folder}/{name}"
            where = self.store.full_path(path)
            try:
                if sum.crc32 is None:
                    now = Sum(self.store.size(path), None)
                else:
                    now = self.store.sum_of(path)
            except FileNotFoundError:
                errors.append(f"{where} is missing")
                continue
            if now.size != sum.size:
                errors.append(f"{where} has {now.size} bytes, and {sum.size} were written")
            elif now.crc32 != sum.crc32:
                errors.append(
                    f"{where} was altered: its CRC-32 is {now.crc32:08x}, and {sum.crc32:08x} was "
                    "written"
                )
        return errors

    @contextlib.contextmanager
    def saving(self, step: int) -> Iterator[str]:
        """Make a folder to write a checkpoint into.

        It is removed if the context ends without `commit`, and by the next manager if the process
        ends.

        Yields:
            The folder's name.
        """
        if not self._tidied:
            self.remove_leftovers(all_of_them=True)
            self._tidied = True
        with contextlib.ExitStack() as stack:
            if isinstance(self.store, LocalStore):
                folder = self._claim(step, self.store, stack)
            else:
                folder = self._free(step)
                self.store.make_folder(folder)
                self._mark(folder)
            try:
                yield folder
            except BaseException as error:
                self._give_up(folder, error)
                raise

    def commit(self, folder: str, step: int, files: dict[str, Sum]) -> str:
        """Commit the files in a folder as a checkpoint.

        Args:
            folder: from `saving`.
            step: of the checkpoint.
            files: all files written.
        """
        manifest = Manifest(step, 1 + max([0, *map(self._order, self._newest())]), files)
        with self.store.writing(f"{folder}/{MANIFEST}") as file:
            file.write(manifest.to_bytes())
        if self.store.atomic:
            self.store.sync_folder(folder)
            final = self._free(step)
            self.store.rename(folder, final)
            self.store.sync_folder("")
        else:
            final = folder
            self.store.remove(f"{folder}/{_MARK}")
        return final

    def prune(self, step: int, keep: int) -> None:
        """Remove the checkpoints that a new one replaces.

        Args:
            step: just committed.
            keep: how many checkpoints remain, those committed last; 0 keeps all.
        """
        self._tidy(step)
        oldest_first = sorted(self._newest(), key=self._age)
        for folder in oldest_first[: max(0, len(oldest_first) - keep) if keep else 0]:
            self._remove(folder)

    def remove_leftovers(self, *, all_of_them: bool) -> None:
        """Remove files of saves and removals that were killed.

        Args:
            all_of_them: also those that only the single saving process can tell from live ones.
        """
        for name in self.store.names(""):
            try:
                self._remove_leftover(name, all_of_them)
            except OSError as error:
                warnings.warn(
                    f"{self.store.full_path(name)} is left over from a killed save, and cannot "
                    f"be removed: {error}",
                    stacklevel=3,
                )
        if all_of_them:
            for step in self._folders():
                self._tidy(step)

    def _remove_leftover(self, name: str, all_of_them: bool) -> None:
        if name.startswith(_DOOMED):
            self.store.remove_tree(name)
        elif name.startswith(TEMPORARY) and isinstance(self.store, LocalStore):
            with contextlib.suppress(FileNotFoundError), self.store.locked(name) as dead:
                if dead:
                    self.store.remove_tree(name)
        elif all_of_them and _FOLDER.fullmatch(name) and self.store.exists(f"{name}/{_MARK}"):
            if self._is_committed(name):
                self.store.remove(f"{name}/{_MARK}")
            else:
                self.store.remove_tree(name, last=_MARK)

    def _folders(self) -> dict[int, list[str]]:
        """The folders with a complete checkpoint, by step; the current one is last."""
        folders: dict[int, list[tuple[int, str]]] = {}
        for name in self.store.names(""):
            match = _FOLDER.fullmatch(name)
            if match and self._is_committed(name):
                folders.setdefault(int(match[1]), []).append((int(match[2] or 0), name))
        return {step: [name for _, name in sorted(names)] for step, names in folders.items()}

    def _is_committed(self, folder: str) -> bool:
        """Whether a checkpoint was committed (later alterations are detected by `check`)."""
        if not self.store.exists(f"{folder}/{MANIFEST}"):
            return self.store.exists(f"{folder}/{_TORCH_XLA}")
        if self.store.atomic or not self.store.exists(f"{folder}/{_MARK}"):
            return True
        try:  # the mark goes after the manifest is complete
            self.manifest(folder)
        except CheckpointError:
            return False
        return True

    def _newest(self) -> list[str]:
        return [folders[-1] for folders in self._folders().values()]

    def _order(self, folder: str) -> int:
        """The manifest's order; -1 of a damaged checkpoint."""
        try:
            manifest = self.manifest(folder)
        except CheckpointError:
            return -1
        return manifest.order if manifest else 0

    def _age(self, folder: str) -> tuple[int, int]:
        return self._order(folder), _step(folder)

    def _claim(self, step: int, store: LocalStore, stack: contextlib.ExitStack) -> str:
        """A new folder, locked as long as this process saves."""
        while True:
            folder = f"{TEMPORARY}{step}-{uuid.uuid4().hex[:8]}"
            store.make_folder(folder)
            # A manager that starts at this very moment may take the folder for a leftover.
            with contextlib.suppress(FileNotFoundError):
                locked = stack.enter_context(store.locked(folder))
                if locked is not False and store.exists(folder):
                    return folder

    def _free(self, step: int) -> str:
        """A new folder for a checkpoint of a step, which may have others."""
        name, version = str(step), 0
        while self.store.exists(name):
            version += 1
            name = f"{step}.{version}"
        return name

    def _tidy(self, step: int) -> None:
        """Keep one folder of a step: the newest, on a disk by the name of the step."""
        *older, newest = self._folders()[step]
        for folder in older:
            self._remove(folder)
        if self.store.atomic and newest != str(step) and not self.store.exists(str(step)):
            self.store.rename(newest, str(step))
            self.store.sync_folder("")

    def _remove(self, folder: str) -> None:
        """Remove a checkpoint: first atomically uncommit it, then remove its files."""
        if self.store.atomic:
            doomed = f"{_DOOMED}{folder}-{uuid.uuid4().hex[:8]}"
            self.store.rename(folder, doomed)
            self.store.sync_folder("")
            self.store.remove_tree(doomed)
            return
        self._mark(folder)
        for name in (MANIFEST, _TORCH_XLA):
            with contextlib.suppress(FileNotFoundError):
                self.store.remove(f"{folder}/{name}")
        self.store.remove_tree(folder, last=_MARK)

    def _mark(self, folder: str) -> None:
        with self.store.writing(f"{folder}/{_MARK}") as file:
            file.write(b"\n")

    def _give_up(self, folder: str, error: BaseException) -> None:
        try:
            self.store.remove_tree(folder, last=_MARK)
        except OSError as another:
            error.add_note(f"{self.store.full_path(folder)} could not be removed either: {another}")


def _step(folder: str) -> int:
    return int(folder.partition(".")[0])


def _signature(line: bytes) -> bytes:
    return f"{zlib.crc32(line):08x}\n".encode()
