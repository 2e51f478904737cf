"""Counters and compilations: `isoshard.metrics.report()`.

>>> from isoshard import metrics
>>> metrics.reset()
>>> metrics.report()
nothing was counted
"""

from isoshard.core.runtime.metrics import (
    KNOWN,
    Compilation,
    Transfer,
    compilations,
    count,
    counters,
    record_compilation,
    record_peak,
    record_transfer,
    report,
    reset,
    transfers,
    user_location,
)

__all__ = [
    "KNOWN",
    "Compilation",
    "Transfer",
    "compilations",
    "count",
    "counters",
    "record_compilation",
    "record_peak",
    "record_transfer",
    "report",
    "reset",
    "transfers",
    "user_location",
]
