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

import os
from typing import Any

from rich.table import Table

from benchmarks.knn_contestants import CONTESTANTS, DEVICES
from tools.harness import calls, tables, timing
from tools.harness.command import Benchmark

Size = tuple[int, int, int]
SMALL: Size = (20_000, 2_000, 17)
"""Points, queries, and neighbours of each."""
LARGE: Size = (234_567, 12_345, 17)
LIMIT = 300
"""Seconds for one contestant."""


def main() -> None:
    """Run the benchmark and save `benchmarks/results/domain_knn.json`."""
    benchmark = Benchmark("domain_knn", __doc__, rounds=10, docs=("benchmarks.md", markdown))
    benchmark.add("--turns", type=int, default=2, help="times that each is started (2)")
    options = benchmark.parse()
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
    benchmark.finish(results, *both(results))


def run(name: str, size: Size, rounds: int, *, limit: float = LIMIT) -> list[dict[str, Any]]:
    """Start the processes of one contestant and wait for what they find.

    Args:
        name: of `CONTESTANTS`.
        size: points, queries, neighbours.
        rounds: timed calls.
        limit: seconds, after which they are ended.

    Returns:
        What each process found.

    Raises:
        RuntimeError: one failed, or took too long.
    """
    variables = [{"OMP_NUM_THREADS": str(os.cpu_count())}]
    variables = calls.ranks(DEVICES) if name == "DTensor" else variables
    try:
        return calls.together(
            "benchmarks.knn_contestants:measured",
            *(name, *size, rounds),
            variables=[{**variable, "JAX_PLATFORMS": "cpu"} for variable in variables],
            limit=limit,
        )
    except calls.Failed as error:
        raise RuntimeError(f"{name} {error}") from None


def summary(turns_of: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """Put the turns and processes of each contestant together.

    Args:
        turns_of: by name, for each turn, what each process found.

    Returns:
        By name: median and best milliseconds, ratio to isoshard's median, seconds of the first call
        (compilation included), processes, and MiB: at the peak and added to what was there before.

    Raises:
        RuntimeError: they did not find the same.
    """
    times = {
        name: [seconds for turn in turns for seconds in turn[0]["seconds"]]
        for name, turns in turns_of.items()
    }
    results: dict[str, Any] = timing.summary(times, "isoshard")
    want = turns_of["isoshard"][0][0]["sums"]
    for name, turns in turns_of.items():
        for sums in (record["sums"] for turn in turns for record in turn):
            if any(abs(a - b) > 1e-5 * abs(b) for a, b in zip(sums, want, strict=True)):
                raise RuntimeError(f"{name} found sums of {sums}, isoshard {want}")
        results[name] |= {
            "first_s": min(turn[0]["first_s"] for turn in turns),
            "processes": len(turns[0]),
            "peak_mib": max(sum(record["peak"] for record in turn) for turn in turns) / 2**20,
            "added_mib": max(
                sum(record["peak"] - record["before"] for record in turn) for turn in turns
            )
            / 2**20,
        }
    return results


def table(results: dict[str, Any], size: Size) -> Table:
    """Show what `summary` found."""
    points, queries, k = size
    columns = {
        "median": "{median_ms:.0f} ms",
        "best": "{best_ms:.0f} ms",
        "ratio": "{ratio:.2f}",
        "first": "{first_s:.1f} s",
        "processes": "{processes}",
        "peak": "{peak_mib:.0f} MiB",
        "added": "{added_mib:.0f} MiB",
    }
    title = f"{queries:,} queries in {points:,} points, k = {k}, {DEVICES} devices"
    return tables.by_name(title, columns, results)


def both(measured: dict[str, Any]) -> list[Table]:
    """The tables of the small and of the large cloud.

    Args:
        measured: the results.
    """
    return [table(measured[name], size) for name, size in (("small", SMALL), ("large", LARGE))]


def markdown(measured: dict[str, Any]) -> str:
    """The table of docs/benchmarks.md.

    Args:
        measured: the results.
    """
    return "\n\n".join(map(tables.in_markdown, both(measured)))


if __name__ == "__main__":
    main()
