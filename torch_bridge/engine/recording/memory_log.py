"""What a capture, a loop's body or a traced layer touches of the memory around it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

from isoshard.core.errors import CaptureError
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.engine.values.value import Storage, Value

from .recorder import Recorder, recorder


class MemoryLog:
    """What a capture reads of the memory that a step touches.

    Args:
        tape: where the step is recorded.

    Attributes:
        tape: the same.
        storages: by id, each storage that was there before the step, with its value at first touch.
        uploads: values brought from the host inside the step.
        created: the slot of the first value of each storage made inside the step, by id.
    """

    def __init__(self, tape: Recorder):
        """See the class."""
        self.tape = tape
        self.storages: dict[int, tuple[Storage, Value]] = {}
        self.uploads: list[Value] = []
        self.created: dict[int, int] = {}
        self._last: dict[int, weakref.ref[Value]] = {}
        self._writes: dict[int, tuple[weakref.ref[Value], Value]] = {}
        self._thread = threading.get_ident()

    def touch(self, storage: Storage) -> None:
        """Note a storage when it is first read or written."""
        if id(storage) in self.storages:
            return
        value = visible(storage)
        if value.tape is not self.tape and not any(value is upload for upload in self.uploads):
            self.storages[id(storage)] = (storage, value)

    def wrote(self, storage: Storage) -> None:
        """Note what the step itself has written to a storage."""
        noted = self.storages.get(id(storage))
        if noted is not None:
            last = self._last[id(storage)] = weakref.ref(storage.value)
            self._writes[id(storage.value)] = (last, noted[1])

    def before(self, value: Value) -> Value | None:
        """The value of memory before the step wrote `value` to it, for other threads."""
        last, first = self._writes.get(id(value), (None, None))
        if last is None or last() is not value or self._thread == threading.get_ident():
            return None
        return first

    def refuse_others(self) -> None:
        """Raise for another thread that reads a value of the step.

        Raises:
            CaptureError: it is another thread.
        """
        if self._thread != threading.get_ident():
            raise CaptureError(
                f"{metrics.user_location()}: the value of a tensor is needed that a compiled step "
                "computes, which another thread is capturing just now. Let the thread that "
                "captures hand its results over when its call has returned."
            )

    def disturbed(self) -> list[Storage]:
        """Memory to which others have written since the step touched it."""
        return [
            storage
            for storage, first in self.storages.values()
            if not self._is_undisturbed(storage, first)
        ]

    def _is_undisturbed(self, storage: Storage, first: Value) -> bool:
        """Whether a storage has the value from before the step, or one that the step wrote."""
        last = self._last.get(id(storage))
        return visible(storage) is (first if last is None else last())

    def put_back(self) -> None:
        """Take back what the step itself wrote; what others wrote since is kept."""
        for key, (storage, first) in self.storages.items():
            last = self._last.get(key)
            if last is not None and storage.value is last():
                storage.value = first
        self._last.clear()
        self._writes.clear()

    def clear(self) -> None:
        """Forget the memory that was touched."""
        self.storages.clear()
        self._last.clear()
        self._writes.clear()


def visible(storage: Storage) -> Value:
    """The value of memory as this thread sees it: without what a step writes in another thread.

    What a step writes while it is captured belongs to its thread until the capture has ended.
    """
    value = storage.value
    if value.array is None:
        tape = value.tape
        before = None if tape is None else tape.value_before(value)
        if before is not None:
            return before
    return value


@contextlib.contextmanager
def logged_to(log: MemoryLog | None) -> Iterator[None]:
    """Context in which the memory that operations touch is noted in `log`; None: nowhere."""
    current = recorder()
    before, current.log = current.log, log
    try:
        yield
    finally:
        recorder().log = before


def note_constant(value: Value) -> None:
    """Let a captured step use this value in every replay."""
    log = recorder().log
    if log is not None:
        log.uploads.append(value)
