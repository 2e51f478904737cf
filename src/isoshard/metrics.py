"""Counters, compilations and caches: `isoshard.metrics.report()`, `.cache_sizes()`.

>>> from isoshard import metrics
>>> metrics.reset()
>>> metrics.report()
nothing was counted
"""

from __future__ import annotations

from .core.deprecations import moved_attribute
from .core.runtime.caches import CacheSize
from .core.runtime.caches import cache_sizes
from .core.runtime.caches import clear_caches
from .core.runtime.metrics import Compilation
from .core.runtime.metrics import Transfer
from .core.runtime.metrics import compilations
from .core.runtime.metrics import count
from .core.runtime.metrics import counters
from .core.runtime.metrics import report
from .core.runtime.metrics import reset
from .core.runtime.metrics import transfers
from typing import Any


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

_MOVED = ("KNOWN", "record_compilation", "record_peak", "record_transfer", "user_location")


def __getattr__(name: str) -> Any:
    """A name that is no longer public, with a warning."""
    if name in _MOVED:
        return moved_attribute(__name__, name, "isoshard.core.runtime.metrics")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
