"""A storage that fails: at its n-th operation, or when it has taken so many bytes."""

from __future__ import annotations

import contextlib
import io

from isoshard.core.checkpoint.store import FsspecStore, LocalStore


class Injected(OSError):
    """The fault."""


class Faults:
    """When and how a storage fails.

    Args:
        operation: fail at this operation (from 0).
        byte: fail when this byte would be written (from 0), after those before it.
        once: only then; otherwise at everything that follows, as a storage that is gone.
    """

    def __init__(self, *, operation=None, byte=None, once=False):
        self.operation, self.byte, self.once = operation, byte, once
        self.operations = self.bytes = 0
        self.failed = 0
        self.log = []

    def step(self, name, *paths):
        """An operation begins."""
        self.log.append((name, *paths))
        number, self.operations = self.operations, self.operations + 1
        if number == self.operation or (self.failed and not self.once):
            self.fail(f"operation {number}: {name} {paths}")

    def take(self, count):
        """How many of `count` bytes are written before a fault."""
        before, self.bytes = self.bytes, self.bytes + count
        if self.byte is not None and before <= self.byte < self.bytes and not self.failed:
            return self.byte - before
        return count

    def fail(self, text):
        self.failed += 1
        raise Injected(text)


class _File(io.FileIO):
    def __init__(self, path, faults):
        super().__init__(path, "wb")
        self._faults = faults

    def write(self, data):
        self._faults.step("write")
        block = memoryview(data).cast("B")
        some = self._faults.take(block.nbytes)
        if some < block.nbytes:
            super().write(block[:some])
            self._faults.fail(f"byte {self._faults.byte}")
        return super().write(block)


class _FaultyChanges:
    """Faults in what changes names; before the storage in the order of base classes."""

    def make_folder(self, path):
        self.faults.step("make_folder", path)
        super().make_folder(path)

    def rename(self, old, new):
        self.faults.step("rename", old, new)
        super().rename(old, new)

    def remove(self, path):
        self.faults.step("remove", path)
        super().remove(path)


class FaultyLocal(_FaultyChanges, LocalStore):
    """A local folder with faults in every operation that changes it, and in opening files."""

    def __init__(self, root, faults):
        super().__init__(root)
        self.faults = faults

    def remove_folder(self, path):
        self.faults.step("remove_folder", path)
        super().remove_folder(path)

    def names(self, path):
        self.faults.step("names", path)
        return super().names(path)

    @contextlib.contextmanager
    def reading(self, path):
        self.faults.step("reading", path)
        with super().reading(path) as file:
            yield file

    @contextlib.contextmanager
    def writing(self, path):
        with super().writing(path) as file:
            yield file
        self.faults.log.append(("written", path))

    def sync_folder(self, path):
        super().sync_folder(path)
        self.faults.log.append(("kept", path))

    def _open(self, path):
        self.faults.step("open", str(path))
        return _File(path, self.faults)

    def _sync(self, number):
        self.faults.step("sync")
        super()._sync(number)


class FaultyRemote(_FaultyChanges, FsspecStore):
    """A folder of fsspec with faults in every operation that changes it."""

    def __init__(self, files, root, faults):
        super().__init__(files, root)
        self.faults = faults

    @contextlib.contextmanager
    def writing(self, path):
        self.faults.step("open", path)
        with super().writing(path) as file:
            yield _Stream(file, self.faults)
            self.faults.step("close", path)


class _Stream(io.RawIOBase):
    def __init__(self, file, faults):
        super().__init__()
        self._file, self._faults = file, faults

    def write(self, data):
        some = self._faults.take(memoryview(data).nbytes)
        if some < memoryview(data).nbytes:
            self._file.write(memoryview(data).cast("B")[:some])
            self._faults.fail(f"byte {self._faults.byte}")
        return self._file.write(data)
