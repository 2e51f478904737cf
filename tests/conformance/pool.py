"""Worker processes: each tries one entry at a time, and may crash or hang without harm.

XLA can end a process, so entries run in processes of their own. A worker that dies or exceeds the
time limit is replaced, and its entry is tried again column by column, so that the culprit is named.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

from .cells import Cell

TASKS_PER_WORKER = 120
"""A process is replaced after so many entries: it keeps every program it compiled."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One entry, and the columns of it to try."""

    entry: str
    columns: tuple[str, ...]


class Worker:
    """A process that answers tasks with cells."""

    def __init__(self, target: str, options: dict[str, Any]):
        """Start it; `target` is `module:function`, called with `options`, then with each task."""
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, target, options), daemon=True)
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


def _serve(connection: Connection, target: str, options: dict[str, Any]) -> None:
    module, _, function = target.partition(":")
    run = getattr(importlib.import_module(module), function)(**options)
    connection.send(None)  # ready
    try:
        while True:
            task = connection.recv()
            connection.send(run(task.entry, task.columns))
    except EOFError:
        os._exit(0)  # the other side has gone: nothing is left to tear down in order


def run_all(
    tasks: Iterable[Task],
    target: str,
    *,
    jobs: int,
    limit: float,
    options: dict[str, Any] | None = None,
    report: Callable[[str, dict[str, Cell]], None] = lambda entry, cells: None,
) -> dict[str, dict[str, Cell]]:
    """Run tasks in worker processes.

    Args:
        tasks: what to try.
        target: `module:function`; the function is called in each worker with `options` and returns
            `(entry, columns) -> cells`.
        jobs: number of processes.
        limit: seconds after which a task's process is ended.
        options: see `target`.
        report: told of each entry's cells when they come in.

    Returns:
        The cells of each entry; those of a process that ended are `crash` or `timeout`.
    """
    waiting = collections.deque(tasks)
    results: dict[str, dict[str, Cell]] = collections.defaultdict(dict)
    workers: list[Worker] = []

    def finish(task: Task, cells: dict[str, Cell]) -> None:
        results[task.entry].update(cells)
        report(task.entry, cells)

    def lost(worker: Worker, status: str, reason: str) -> None:
        worker.stop()
        workers.remove(worker)
        task = worker.task
        if task is None:
            raise RuntimeError(f"a conformance worker could not start: {reason}")
        if len(task.columns) > 1:
            waiting.extendleft(Task(task.entry, (name,)) for name in task.columns)
        else:
            finish(task, {task.columns[0]: Cell(status, reason=reason)})

    try:
        while waiting or any(worker.task for worker in workers):
            while len(workers) < min(jobs, len(workers) + len(waiting)):
                workers.append(Worker(target, options or {}))
            ready = wait([worker.connection for worker in workers], timeout=0.5)
            now = time.monotonic()
            for worker in list(workers):
                if worker.connection in ready:
                    try:
                        cells = worker.connection.recv()
                    except (EOFError, ConnectionResetError):
                        worker.process.join()
                        lost(worker, "crash", f"the process ended ({worker.process.exitcode})")
                        continue
                    if worker.task is not None:
                        finish(worker.task, cells)
                        worker.task = None
                        worker.done += 1
                    if worker.done >= TASKS_PER_WORKER or not waiting:
                        worker.stop()
                        workers.remove(worker)
                    else:
                        worker.give(waiting.popleft())
                elif now - worker.started > limit:
                    lost(worker, "timeout", f"not done after {limit:.0f} s")
    finally:
        for worker in workers:
            worker.stop()
    return dict(results)
