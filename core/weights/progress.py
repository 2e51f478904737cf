"""Progress of long reads: a bar, a function that is told, or nothing.

>>> told = []
>>> with shown(lambda done, total: told.append((done, total)), 10, "weights") as tell:
...     tell(4)
...     tell(6)
>>> told
[(4, 10), (10, 10)]
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

Progress = Callable[[int, int], object]


@contextlib.contextmanager
def shown(progress: bool | Progress, total: int, name: str) -> Iterator[Callable[[int], None]]:
    """Give a function that is told each number of bytes, from any thread.

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
        with _bar(total, name) as tell:
            yield tell
    else:
        yield _Sum(progress, total)


class _Sum:
    """Adds up, and tells the sum."""

    def __init__(self, tell: Progress, total: int):
        self._tell, self._total, self._done = tell, total, 0
        self._lock = threading.Lock()

    def __call__(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._tell(self._done, self._total)


@contextlib.contextmanager
def _bar(total: int, name: str) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(name, total=total)
        yield lambda size: bar.advance(task, size)
