"""Counters and compilations: `isoshard.metrics.report()`.

>>> from isoshard import metrics
>>> metrics.reset()
>>> metrics.report()
'nothing was counted'
"""

from isoshard.core.metrics import (
    KNOWN,
    Compilation,
    compilations,
    count,
    counters,
    record_compilation,
    report,
    reset,
    user_location,
)

__all__ = [
    "KNOWN",
    "Compilation",
    "compilations",
    "count",
    "counters",
    "record_compilation",
    "report",
    "reset",
    "user_location",
]
