"""Step closures: functions that run when a step has been executed.

A loss read in the middle of a step would execute half of it. A closure is kept until the next
`sync`, when the tensors it got are computed:

>>> import torch, isoshard.torch_bridge as xs
>>> loss = torch.ones(3, device="jax").sum()
>>> add_step_closure(lambda value: print("loss", value.item()), args=(loss,))
>>> xs.sync()
loss 3.0
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

Closure = Callable[[], Any]

_at_next_sync: list[Closure] = []
_in_background: list[Closure] = []


def add_step_closure(
    closure: Callable[..., Any], args: tuple[Any, ...] = (), run_async: bool = False
) -> None:
    """Call a function after the next `sync` (or `mark_step`, or the end of a `step`).

    Args:
        closure: the function.
        args: its arguments; tensors among them have their values by then.
        run_async: call it in a background thread, so that the next step does not wait. Such
            closures run one after the other. The error of one is raised by a later `sync`.
    """
    queued = _in_background if run_async else _at_next_sync
    queued.append(lambda: closure(*args))


def run_step_closures() -> None:
    """Run what waits for the end of a step. `sync` calls it.

    Raises:
        RuntimeError: a closure that ran in the background has failed.
    """
    if _in_background:
        background, _in_background[:] = _in_background[:], []
        _HANDLER.run_all(background)
    if _at_next_sync:
        waiting, _at_next_sync[:] = _at_next_sync[:], []
        for closure in waiting:
            closure()


class ClosureHandler:
    """Runs closures as they come, in the caller's thread."""

    def run(self, closure: Closure) -> None:
        """Run one closure."""
        closure()

    def run_all(self, closures: Sequence[Closure]) -> None:
        """Run several, in order."""
        for closure in closures:
            self.run(closure)


class AsyncClosureHandler(ClosureHandler):
    """Runs closures in a thread of its own, one after the other.

    After an error nothing more runs until it was raised to the caller of `run`. At the end of the
    process what is queued still runs, and an error that was not raised yet is printed.

    Args:
        max_queue_size: how many may wait before `run` does; `XLA_MAX_ASYNC_QUEUE` overrides it.
    """

    def __init__(self, max_queue_size: int = 100):
        """See the class."""
        size = int(os.environ.get("XLA_MAX_ASYNC_QUEUE", max_queue_size))
        self._waiting: queue.Queue[Closure] = queue.Queue(size)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        atexit.register(self._print_failure)

    def run(self, closure: Closure) -> None:
        """Queue one closure.

        Raises:
            RuntimeError: an earlier one failed; its error is the cause.
        """
        queued = False
        while not queued:
            self._raise_failure()
            self._start()
            try:
                self._waiting.put(closure, timeout=0.1)
                queued = True
            except queue.Full:
                continue
        self._start()

    def wait(self) -> None:
        """Wait until everything queued has run.

        Raises:
            RuntimeError: a closure failed; its error is the cause.
        """
        thread = self._thread
        if thread is not None:
            thread.join()
        self._raise_failure()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="step closures")
                self._thread.start()

    def _work(self) -> None:
        while True:
            try:
                closure = self._waiting.get(timeout=0.1)
            except queue.Empty:
                with self._lock:  # nothing is queued between the test and the end
                    if self._waiting.empty():
                        self._thread = None
                        return
                continue
            try:
                closure()
            except BaseException as error:
                with self._lock:
                    self._failure = error
                    self._thread = None
                return

    def _raise_failure(self) -> None:
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise RuntimeError(
                "a step closure that ran in the background failed with "
                f"{type(failure).__name__}: {failure}"
            ) from failure

    def _print_failure(self) -> None:
        if self._failure is not None:
            print("a step closure that ran in the background failed:", file=sys.stderr)
            traceback.print_exception(self._failure)


_HANDLER = AsyncClosureHandler()
