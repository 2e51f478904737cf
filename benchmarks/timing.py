"""Fair timing on a busy machine: contestants take turns, and medians are compared.

>>> rounds = interleave({"a": lambda: None, "b": lambda: None}, rounds=5)
>>> sorted(rounds), len(rounds["a"])
(['a', 'b'], 5)
>>> summary({"a": [2.0, 4.0, 3.0], "b": [6.0, 6.0, 7.0]}, "a")["b"]
{'median_ms': 6000.0, 'best_ms': 6000.0, 'ratio': 2.0}
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("isoshard", "jax", "jaxlib", "torch", "numpy")


def interleave(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Time functions in turns: one call of each, in changing order, then the next round.

    Args:
        contestants: functions that return when their work is done.
        rounds: calls of each that count.
        warmup: calls of each before those.

    Returns:
        Seconds of each call.
    """
    for function in contestants.values():
        for _ in range(warmup):
            function()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started = time.perf_counter()
            contestants[name]()
            times[name].append(time.perf_counter() - started)
    return times


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


def save(name: str, results: dict[str, Any]) -> Path:
    """Write results with all that is needed to repeat them to `benchmarks/results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**circumstances(), "results": results}, indent=1) + "\n")
    return path


def saved(name: str) -> dict[str, Any]:
    """The results written before; empty if there are none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["results"] if path.exists() else {}


def circumstances() -> dict[str, Any]:
    """Machine, versions, command and date."""
    return {
        "command": f"python -m {_module()} {' '.join(sys.argv[1:])}".strip(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        },
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in _PACKAGES},
        },
    }


def _module() -> str:
    return getattr(sys.modules["__main__"].__spec__, "name", "benchmarks")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())
