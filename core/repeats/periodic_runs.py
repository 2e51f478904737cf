"""Ranges of a sequence of integers that repeat with one period.

>>> periodic_runs(np.array([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 8, 8]))
[PeriodicRun(start=1, period=3, length=10)]
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

Keys = np.ndarray[Any, np.dtype[np.int64]]

_PERIODS = 24
"""How many periods are tried in a range: those after which most windows repeat."""

_WINDOWS = (16, 4, 1)
"""Lengths of the windows that are compared; long ones find layers, short ones small bodies."""


@dataclasses.dataclass(frozen=True)
class PeriodicRun:
    """A range in which each key equals that a period before it.

    Attributes:
        start: of the run.
        period: of a repeat.
        length: of the run, not always a multiple of the period.
    """

    start: int
    period: int
    length: int


def periodic_runs(keys: Keys, at_least: int = 3) -> list[PeriodicRun]:
    """The runs of a sequence, without overlap, in order; chosen greedily by what they save."""
    result: list[PeriodicRun] = []
    stretches = [(0, len(keys))]
    while stretches:
        begin, end = stretches.pop()
        best = _best(keys[begin:end], at_least)
        if best is None:
            continue
        run = dataclasses.replace(best, start=begin + best.start)
        result.append(run)
        stretches += [(begin, run.start), (run.start + run.length, end)]
    return sorted(result, key=lambda run: run.start)


def _best(keys: Keys, at_least: int) -> PeriodicRun | None:
    best = None
    saved = 0
    for period in _periods(keys, at_least):
        starts, matching = _matching(keys, period)
        if len(matching):
            longest = int(matching.argmax())
            length = int(matching[longest]) + period
            if length >= at_least * period and length - period > saved:
                best, saved = PeriodicRun(int(starts[longest]), period, length), length - period
    return best


def _periods(keys: Keys, at_least: int) -> list[int]:
    """The most frequent distances between equal windows."""
    counts: dict[int, int] = {}
    for window in _WINDOWS:
        if len(keys) < window * at_least:
            continue
        distances, indices = np.unique(_distances(_hashes(keys, window)), return_counts=True)
        frequent = np.argsort(-indices, kind="stable")[:_PERIODS]
        for position in frequent.tolist():
            period = int(distances[position])
            counts[period] = max(counts.get(period, 0), int(indices[position]))
    most = len(keys) // at_least
    return sorted(
        (count for count in counts if count <= most), key=lambda count: (-counts[count], count)
    )[: 2 * _PERIODS]


def _hashes(keys: Keys, window: int) -> Keys:
    """A hash of each window of the keys; `window` is a power of two."""
    hashes = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
    width = 1
    while width < window:
        hashes = (hashes[:-width] * np.uint64(0xBF58476D1CE4E5B9)) ^ (
            hashes[width:] * np.uint64(0x94D049BB133111EB) + np.uint64(width)
        )
        width *= 2
    return hashes.view(np.int64)


def _distances(hashes: Keys) -> Keys:
    """The distance from each window to the next equal one."""
    order = np.argsort(hashes, kind="stable")
    same = hashes[order[1:]] == hashes[order[:-1]]
    return (order[1:] - order[:-1])[same]


def _matching(keys: Keys, period: int) -> tuple[Keys, Keys]:
    """The ranges in which keys equal those a period later: their starts and lengths."""
    same = np.concatenate(([False], keys[period:] == keys[:-period], [False]))
    borders = np.flatnonzero(same[1:] != same[:-1])
    return borders[::2], borders[1::2] - borders[::2]
