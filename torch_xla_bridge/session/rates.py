"""Rates: how many examples a second, lately and since the start."""

from __future__ import annotations

import os
import time


class RateTracker:
    """Counts, and divides by the time that went by.

    Args:
        smooth_factor: weight of the rate before in `rate()`, 0 to 1; by default the number in
            `RATE_TRACKER_SMOOTHING`, or 0.4.

    >>> tracker = RateTracker()
    >>> tracker.add(128)
    >>> tracker.rate() > tracker.global_rate() * 0.99 > 0
    True
    """

    def __init__(self, smooth_factor: float | None = None):
        """Start the clock."""
        if smooth_factor is None:
            smooth_factor = float(os.environ.get("RATE_TRACKER_SMOOTHING", "0.4"))
        self._smooth = smooth_factor
        self._start = self._last = time.monotonic()
        self._all = self._new = 0.0
        self._rate: float | None = None

    def add(self, count: float) -> None:
        """Count."""
        self._new += count

    def rate(self) -> float:
        """How many a second since the last call of `rate`, smoothed."""
        now = time.monotonic()
        passed = now - self._last
        if passed <= 0:
            return 0.0
        rate = self._new / passed
        if self._rate is not None:
            rate += self._smooth * (self._rate - rate)
        self._all, self._new = self._all + self._new, 0.0
        self._last, self._rate = now, rate
        return rate

    def global_rate(self) -> float:
        """How many a second since the tracker was made."""
        passed = time.monotonic() - self._start
        return (self._all + self._new) / passed if passed > 0 else 0.0
