"""Fair timing on a busy machine: contestants take turns, and medians are compared.

>>> rounds = interleave({"a": lambda: None, "b": lambda: None}, rounds=5)
>>> sorted(rounds), len(rounds["a"])
(['a', 'b'], 5)
>>> summary({"a": [2.0, 4.0, 3.0], "b": [6.0, 6.0, 7.0]}, "a")["b"]
{'median_ms': 6000.0, 'best_ms': 6000.0, 'ratio': 2.0}
>>> sorted(turns({"a": lambda: None, "b": lambda: None}, rounds=2, calls=3)["a"])[0] > 0
True
>>> paired([6.0, 6.0, 7.0], [2.0, 4.0, 3.0])
2.3333333333333335
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def interleave(
    contestants: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 2,
    settle: Callable[[Any], Any] | None = None,
) -> dict[str, list[float]]:
    """Time functions in turns: one call of each, in changing order, then the next round.

    Args:
        contestants: functions that return when their work is done.
        rounds: calls of each that count.
        warmup: calls of each before those.
        settle: called with each result, outside of the time, where a function returns before its
            work is done.

    Returns:
        Seconds of each call.
    """
    for function in contestants.values():
        for _ in range(warmup):
            seconds(function, settle)
    if settle is not None:
        gc.collect()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(seconds(contestants[name], settle))
    return times


def turns(
    contestants: Mapping[str, Callable[[], Any]], *, rounds: int, calls: int, seed: int = 0
) -> dict[str, list[float]]:
    """Time functions in turns of several calls, in random order, the same with each seed.

    The first call of a turn finds the caches as another function left them, and does not count.

    Args:
        contestants: functions that return when their work is done.
        rounds: turns of each.
        calls: of one turn that count.
        seed: of the order.

    Returns:
        Seconds of each call.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = random.Random(seed)
    for _ in range(rounds):
        for name in order.sample(list(contestants), len(contestants)):
            seconds(contestants[name])
            times[name] += [seconds(contestants[name]) for _ in range(calls)]
    return times


def quartile(times: Sequence[float]) -> float:
    """What a quarter of the calls did not exceed: other programs make calls slower, never faster.

    Args:
        times: of at least two calls.

    Example:
        >>> quartile([1.0, 2.0, 3.0, 4.0, 90.0])
        2.0
    """
    return statistics.quantiles(times, n=4, method="inclusive")[0]


def seconds(function: Callable[[], Any], settle: Callable[[Any], Any] | None = None) -> float:
    """Time one call; what it returns goes within the time, or after it to `settle`."""
    started = time.perf_counter()
    if settle is None:
        function()
        return time.perf_counter() - started
    result = function()
    taken = time.perf_counter() - started
    settle(result)
    return taken


def summary(times: Mapping[str, Sequence[float]], baseline: str) -> dict[str, dict[str, float]]:
    """Medians in milliseconds, and their ratios to the baseline's."""
    base = statistics.median(times[baseline])
    return {
        name: {
            "median_ms": statistics.median(taken) * 1e3,
            "best_ms": min(taken) * 1e3,
            "ratio": statistics.median(taken) / base,
        }
        for name, taken in times.items()
    }


def paired(times: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios, round by round."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def resident(line: str) -> int:
    """Resident bytes of this process, now ("VmRSS") or at most ("VmHWM"), as Linux counts them."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(f"{line}:"):
            return int(text.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {line}; memory is measured on Linux only")
