"""Counters, compilations and caches: `isoshard.metrics.report()`, `.cache_sizes()`.

>>> from isoshard import metrics
>>> metrics.reset()
>>> metrics.report()
nothing was counted
"""

from __future__ import annotations

from typing import Any

from .core.deprecations import moved_attribute
from .core.runtime.caches import CacheSize, cache_sizes, clear_caches
from .core.runtime.metrics import (
    Compilation,
    Transfer,
    compilations,
    count,
    counters,
    report,
    reset,
    transfers,
)

__all__ = [
    "CacheSize",
    "Compilation",
    "Transfer",
    "cache_sizes",
    "clear_caches",
    "compilations",
    "count",
    "counters",
    "report",
    "reset",
    "transfers",
]

_MOVED = {
    "KNOWN": "DESCRIPTIONS",
    "record_compilation": "record_compilation",
    "record_peak": "record_peak",
    "record_transfer": "record_transfer",
    "user_location": "user_location",
}


def __getattr__(name: str) -> Any:
    """A name that is no longer public, with a warning."""
    if name in _MOVED:
        return moved_attribute(__name__, name, "isoshard.core.runtime.metrics", _MOVED[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
