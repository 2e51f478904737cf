"""Worker processes: each does one task after another, and may crash or hang without harm.

    for task, answer in answers([("add", 1), ("sin", 2)], start, jobs=2, limit=60):
        ...    # of a task whose process ended or took too long, the answer is a `Lost`

A process is set up once, by `start(**options)`, which returns the function of a task. XLA keeps all
that it compiles, so a process is replaced after some tasks, and at once when it is lost.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

Task = tuple[Any, ...]
"""The arguments of one call."""
Start = Callable[..., Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class Lost:
    """The answer of a task whose process ended, or had to be ended.

    Attributes:
        status: `crash` or `timeout`.
        reason: in words.
    """

    status: str
    reason: str


class _Worker:
    """A process that answers tasks."""

    def __init__(self, start: Start, options: Mapping[str, Any]):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, start, options), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self.started = time.monotonic()
        self.done = 0

    def give(self, task: Task) -> None:
        """Hand it a task."""
        self.task = task
        self.started = time.monotonic()
        self.connection.send(task)

    def stop(self) -> None:
        """End it, whatever it does."""
        self.connection.close()
        self.process.kill()
        self.process.join()


def _serve(connection: Connection, start: Start, options: Mapping[str, Any]) -> None:
    run = start(**options)
    connection.send(None)  # ready
    try:
        while True:
            connection.send(run(*connection.recv()))
    except EOFError:
        os._exit(0)  # the other side has gone: nothing is left to tear down in order


def answers(
    tasks: Iterable[Task],
    start: Start,
    *,
    jobs: int,
    limit: float = math.inf,
    each: int = 120,
    options: Mapping[str, Any] | None = None,
    parts: Callable[[Task], Iterable[Task]] = lambda task: (),
) -> Iterator[tuple[Task, Any]]:
    """Do tasks in worker processes.

    Args:
        tasks: what to do.
        start: called in each process with `options`; returns the function that does a task. Both
            functions are importable, as processes are spawned.
        jobs: processes at a time.
        limit: seconds after which a task's process is ended; its start has as long.
        each: a process is replaced after so many tasks.
        options: see `start`.
        parts: what to do next in the place of a task that was lost, to find the culprit.

    Yields:
        Each task with its answer, as they come in; of a task that was lost and has no parts, a
        `Lost`. An exception in a task ends its process.

    Raises:
        RuntimeError: a process ended before it was set up.
    """
    waiting = collections.deque(tasks)
    workers: list[_Worker] = []

    def dropped(worker: _Worker) -> None:
        worker.stop()
        workers.remove(worker)

    def lost(worker: _Worker, status: str, reason: str) -> Iterator[tuple[Task, Lost]]:
        dropped(worker)
        if worker.task is None:
            raise RuntimeError(f"a worker could not start: {reason}")
        smaller = list(parts(worker.task))
        waiting.extendleft(smaller)
        if not smaller:
            yield worker.task, Lost(status, reason)

    try:
        while waiting or any(worker.task for worker in workers):
            while len(workers) < min(jobs, len(workers) + len(waiting)):
                workers.append(_Worker(start, options or {}))
            ready = wait([worker.connection for worker in workers], timeout=0.5)
            now = time.monotonic()
            for worker in list(workers):
                if worker.connection in ready:
                    try:
                        answer = worker.connection.recv()
                    except (EOFError, ConnectionResetError):
                        worker.process.join()
                        code = worker.process.exitcode
                        yield from lost(worker, "crash", f"the process ended ({code})")
                        continue
                    task, worker.task = worker.task, None
                    worker.done += task is not None
                    if worker.done >= each or not waiting:
                        dropped(worker)
                    else:
                        worker.give(waiting.popleft())
                    if task is not None:
                        yield task, answer
                elif now - worker.started > limit:
                    yield from lost(worker, "timeout", f"not done after {limit:.0f} s")
    finally:
        for worker in workers:
            worker.stop()
