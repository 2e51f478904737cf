"""Entries in worker processes, as XLA can end a process.

An entry whose process dies or exceeds the time limit is tried again column by column, so that the
culprit is named.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tools.harness.workers import Lost, Start, answers

from .cells import Cell


class Task(NamedTuple):
    """One entry, and the columns of it to try."""

    entry: str
    columns: tuple[str, ...]


def by_column(task: Task) -> list[Task]:
    """The columns of a task one by one; none where there is but one."""
    return [Task(task.entry, (name,)) for name in task.columns if len(task.columns) > 1]


def run_all(
    tasks: Iterable[Task],
    start: Start,
    *,
    jobs: int,
    limit: float,
    each: int = 120,
    options: dict[str, Any] | None = None,
    report: Callable[[str, dict[str, Cell]], None] = lambda entry, cells: None,
) -> dict[str, dict[str, Cell]]:
    """Run tasks in worker processes.

    Args:
        tasks: what to try.
        start: called in each worker with `options`; returns `(entry, columns) -> cells`.
        jobs: number of processes.
        limit: seconds after which a task's process is ended.
        each: tasks after which a process is replaced, as XLA keeps what it compiled.
        options: see `start`.
        report: told of each entry's cells when they come in.

    Returns:
        The cells of each entry; those of a process that ended are `crash` or `timeout`.
    """
    results: dict[str, dict[str, Cell]] = collections.defaultdict(dict)
    found = answers(
        tasks, start, jobs=jobs, limit=limit, each=each, options=options, parts=by_column
    )
    for task, answer in found:
        if isinstance(answer, Lost):
            answer = {task.columns[0]: Cell(answer.status, reason=answer.reason)}
        results[task.entry].update(answer)
        report(task.entry, answer)
    return dict(results)
