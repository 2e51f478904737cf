"""Samples: how long things took, and how large they were.

A counter has a count; a series of samples also durations. Only the latest samples are kept, the
number and the sum count them all.

>>> clear()
>>> observe("compile_seconds", 0.25)
>>> observe("compile_seconds", 0.5)
>>> found = series()["compile_seconds"]
>>> found.count, found.total, [value for _, value in found.latest]
(2, 0.75, [0.25, 0.5])
>>> clear()
>>> series()
{}
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time

KEPT = 1024
"""Samples of a series that are kept one by one."""


@dataclasses.dataclass(frozen=True)
class Series:
    """The samples of one name since the last `clear`.

    Attributes:
        count: how many there were.
        total: their sum.
        latest: the last `KEPT`, as (seconds since the epoch, value), oldest first.
    """

    count: int
    total: float
    latest: tuple[tuple[float, float], ...]


@dataclasses.dataclass
class _Growing:
    count: int = 0
    total: float = 0.0
    latest: collections.deque[tuple[float, float]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=KEPT)
    )


_lock = threading.Lock()
_growing: dict[str, _Growing] = {}


def observe(name: str, value: float) -> None:
    """Add a sample.

    Args:
        name: the series; seconds where it ends in `_seconds`, bytes where it ends in `_bytes`.
        value: the sample.
    """
    now = time.time()
    with _lock:
        growing = _growing.get(name)
        if growing is None:
            growing = _growing[name] = _Growing()
        growing.count += 1
        growing.total += value
        growing.latest.append((now, value))


def series() -> dict[str, Series]:
    """Read every series that has a sample."""
    with _lock:
        return {
            name: Series(growing.count, growing.total, tuple(growing.latest))
            for name, growing in _growing.items()
        }


def clear() -> None:
    """Forget every sample."""
    with _lock:
        _growing.clear()
