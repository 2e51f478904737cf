"""Benchmark: nearest neighbours in a split cloud of points, beside plain torch and DTensor.

    python -m benchmarks.domain_knn [--rounds 10] [--turns 2]

20,000 points, 2,000 queries, k = 17, both split over four devices: `iso.domain.points.knn` on four
virtual devices of one process, the usual formula of broadcast differences in plain torch, and
the same on DTensors of four processes (gloo, one thread each). Contestants run one after the other,
each in processes of its own, in turns; memory is the peak of what is resident, all of a process's
libraries included, summed over processes. Then isoshard alone on 234,567 points and 12,345 queries,
which do not divide by four, and whose differences would be 32 GB. All have to find the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import timing
from benchmarks.dtensor import ROOT, _environment, _free_port
from benchmarks.knn_contestants import CONTESTANTS, DEVICES

Size = tuple[int, int, int]
SMALL: Size = (20_000, 2_000, 17)
"""Points, queries, and neighbours of each."""
LARGE: Size = (234_567, 12_345, 17)
LIMIT = 300
"""Seconds for one contestant."""


def main() -> None:
    """Run the benchmark and save `benchmarks/results/domain_knn.json`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.domain_knn")
    parser.add_argument("--rounds", type=int, default=10, help="timed calls of each, per turn")
    parser.add_argument("--turns", type=int, default=2, help="times that each is started")
    options = parser.parse_args()
    turns = [
        {name: run(name, SMALL, options.rounds) for name in CONTESTANTS}
        for _ in range(options.turns)
    ]
    large = {
        name: [run(name, LARGE, max(1, options.rounds // 3))]
        for name in ("isoshard", "isoshard with gradients")
    }
    results = {
        "small": summary({name: [turn[name] for turn in turns] for name in CONTESTANTS}),
        "large": summary(large),
    }
    console = Console()
    for name, size in (("small", SMALL), ("large", LARGE)):
        console.print(table(results[name], size))
    console.print(f"wrote {timing.save('domain_knn', results)}")


def run(name: str, size: Size, rounds: int, *, limit: float = LIMIT) -> list[dict[str, Any]]:
    """Start the processes of one contestant and wait for what they find.

    Args:
        name: of `CONTESTANTS`.
        size: points, queries, neighbours.
        rounds: timed calls.
        limit: seconds, after which they are ended.

    Returns:
        What each process printed.

    Raises:
        RuntimeError: one failed, or took too long.
    """
    points, queries, k = size
    command = [sys.executable, "-m", "benchmarks.knn_contestants", name, "--points", str(points)]
    command += ["--queries", str(queries), "--k", str(k), "--rounds", str(rounds)]
    end = time.monotonic() + limit
    with contextlib.ExitStack() as stack:  # which waits, and closes the pipes
        started = [
            stack.enter_context(
                subprocess.Popen(
                    command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True
                )
            )
            for variables in _variables(name)
        ]
        try:
            said = [one.communicate(timeout=max(0.1, end - time.monotonic()))[0] for one in started]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{name} took more than {limit:.0f} s") from None
        finally:
            for one in started:
                one.kill()
    if any(one.returncode for one in started):
        raise RuntimeError(f"{name} failed; its errors stand above")
    return [json.loads(text.splitlines()[-1]) for text in said]


def summary(found: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """Put the turns and processes of each contestant together.

    Args:
        found: by name, for each turn, what each process printed.

    Returns:
        By name: median and best milliseconds, ratio to isoshard's median, seconds of the first call
        (compilation included), processes, and MiB: at the peak and added to what was there before.

    Raises:
        RuntimeError: they did not find the same.
    """
    times = {
        name: [seconds for turn in turns for seconds in turn[0]["seconds"]]
        for name, turns in found.items()
    }
    results: dict[str, Any] = timing.summary(times, "isoshard")
    want = found["isoshard"][0][0]["sums"]
    for name, turns in found.items():
        for sums in (one["sums"] for turn in turns for one in turn):
            if any(abs(a - b) > 1e-5 * abs(b) for a, b in zip(sums, want, strict=True)):
                raise RuntimeError(f"{name} found sums of {sums}, isoshard {want}")
        results[name] |= {
            "first_s": min(turn[0]["first_s"] for turn in turns),
            "processes": len(turns[0]),
            "peak_mib": max(sum(one["peak"] for one in turn) for turn in turns) / 2**20,
            "added_mib": max(sum(one["peak"] - one["before"] for one in turn) for turn in turns)
            / 2**20,
        }
    return results


def table(results: dict[str, Any], size: Size) -> Table:
    """Show what `summary` found."""
    points, queries, k = size
    shown = Table(title=f"{queries:,} queries in {points:,} points, k = {k}, {DEVICES} devices")
    shown.add_column("", no_wrap=True)
    for title in ("median", "best", "ratio", "first", "processes", "peak", "added"):
        shown.add_column(title, justify="right")
    for name, row in results.items():
        shown.add_row(
            name,
            *(f"{row[key]:.0f} ms" for key in ("median_ms", "best_ms")),
            f"{row['ratio']:.2f}",
            f"{row['first_s']:.1f} s",
            str(row["processes"]),
            *(f"{row[key]:.0f} MiB" for key in ("peak_mib", "added_mib")),
        )
    return shown


def _variables(name: str) -> Sequence[dict[str, str]]:
    """The environment of each process."""
    base = _environment()
    if name != "DTensor":
        base["OMP_NUM_THREADS"] = str(os.cpu_count())
        return [base]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    world = {"WORLD_SIZE": str(DEVICES), "LOCAL_WORLD_SIZE": str(DEVICES)}
    return [
        base | address | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(DEVICES)
    ]


if __name__ == "__main__":
    main()
