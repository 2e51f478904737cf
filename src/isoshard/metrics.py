"""Counters, compilations and caches: `isoshard.metrics.report()`, `.cache_sizes()`.

>>> from isoshard import metrics
>>> metrics.reset()
>>> metrics.report()
nothing was counted
"""

from isoshard.core.runtime.caches import CacheSize, cache_sizes, clear_caches
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
    "CacheSize",
    "Compilation",
    "Transfer",
    "cache_sizes",
    "clear_caches",
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
