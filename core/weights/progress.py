"""Progress of long reads: a bar, a callback, or nothing.

>>> calls = []
>>> with shown(lambda done, total: calls.append((done, total)), 10, "weights") as advance:
...     advance(4)
...     advance(6)
>>> calls
[(4, 10), (10, 10)]
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

Progress = Callable[[int, int], object]


@contextlib.contextmanager
def shown(progress: bool | Progress, total: int, name: str) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes of each read, from any thread.

    Args:
        progress: True shows a bar of rich; a function is called with bytes done and `total`.
        total: bytes altogether.
        name: what is read, for the bar.

    Yields:
        The function.
    """
    if progress is False:
        yield lambda size: None
    elif progress is True:
        with _bar(total, name) as advance:
            yield advance
    else:
        yield _Sum(progress, total)


class _Sum:
    """Calls a function with the sum of the bytes so far."""

    def __init__(self, progress: Progress, total: int):
        self._progress, self._total, self._done = progress, total, 0
        self._lock = threading.Lock()

    def __call__(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._progress(self._done, self._total)


@contextlib.contextmanager
def _bar(total: int, name: str) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(name, total=total)
        yield lambda size: bar.advance(task, size)
