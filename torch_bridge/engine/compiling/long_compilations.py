"""Lines on the log of a compilation that takes long: its size after five seconds, then its time.

The logger is "isoshard", the level that of warnings, which Python shows unless told otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from isoshard.core.runtime import metrics

_LOGGER = logging.getLogger("isoshard")
SECONDS = 5.0


@contextlib.contextmanager
def reported(operations: int) -> Iterator[None]:
    """Context of a compilation.

    Args:
        operations: of the program, as it was recorded.
    """
    started, where, is_long = time.perf_counter(), metrics.user_location(), threading.Event()

    def begin() -> None:
        is_long.set()
        _LOGGER.warning(
            "%s: compiling a program of %d operations, for %.0f s so far",
            where,
            operations,
            SECONDS,
        )

    timer = threading.Timer(SECONDS, begin)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if is_long.is_set():
            seconds = time.perf_counter() - started
            _LOGGER.warning(
                "%s: the program of %d operations was compiled in %.0f s",
                where,
                operations,
                seconds,
            )
