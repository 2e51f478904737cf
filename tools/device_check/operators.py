"""Entries of torch's operator database, shared by several processes; `entries` compares one.

torch's database takes ten seconds to import, so this process does not import it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tools.harness.workers import Lost, answers

SAMPLES = 2
"""Samples per entry and column, as different from each other as possible."""

TASK_LIMIT = 90
"""Seconds for one entry, compilation included, and for the start of a process."""

STOP_AT = 0.9
"""Share of the section's time after which no further results are awaited."""


def run(part: str, options: Mapping[str, Any], save: Callable[..., None]) -> None:
    """Compare the entries.

    Args:
        part: the section's only part.
        options: of the check; "entries", "jobs" and the "seconds" of the section.
        save: receives the counts by column, the failures, and how many entries were compared.
    """
    ends = time.monotonic() + STOP_AT * options["seconds"]
    count = options["entries"]
    counts: dict[str, dict[str, int]] = {}
    failures: list[dict[str, Any]] = []
    outcomes = answers(
        [(index,) for index in range(count)],
        start,
        jobs=options["jobs"],
        limit=TASK_LIMIT,
        each=count,
        options={"count": count, "samples": SAMPLES},
    )
    for done, ((index,), outcome) in enumerate(outcomes, 1):
        if isinstance(outcome, Lost):
            failures.append(failure(f"entry {index} of {count}", "all", outcome.reason))
        else:
            name, columns = outcome
            for column, result in columns.items():
                add(counts.setdefault(column, {}), result)
                if result["reason"]:
                    failures.append(failure(name, column, result["reason"], result["error"]))
        save(counts=counts, failures=failures, entries=done, of=count)
        if time.monotonic() > ends:
            break


def start(**options: Any) -> Callable[[int], tuple[str, dict[str, dict[str, Any]]]]:
    """Set up a process, see `entries.start`.

    Args:
        **options: of `entries.start`.
    """
    from . import entries  # not in the process of the section

    return entries.start(**options)


def add(counts: dict[str, int], result: Mapping[str, Any]) -> None:
    """Add one result of a column to its counts.

    Args:
        counts: "passed", "compared" (entries) and "samples"; changed in place.
        result: of one entry.

    Example:
        >>> counts = {}
        >>> add(counts, {"reason": "", "samples": 2})
        >>> add(counts, {"reason": "wrong", "samples": 2})
        >>> counts
        {'passed': 1, 'compared': 2, 'samples': 4}
    """
    increments = {"passed": not result["reason"], "compared": 1, "samples": result["samples"]}
    for name, increment in increments.items():
        counts[name] = counts.get(name, 0) + increment


def failure(entry: str, column: str, reason: str, error: float | None = None) -> dict[str, Any]:
    """Describe a failure for the results.

    Args:
        entry: its name.
        column: of the entry; "all" if its process ended.
        reason: in words.
        error: the largest relative error; None if nothing was compared.
    """
    return {"entry": entry, "column": column, "reason": reason, "error": error}
