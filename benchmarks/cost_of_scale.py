"""Benchmark: what a run of many processes costs each of them, from 1 to 32, and by model to 1,024.

    python -m benchmarks.cost_of_scale                    # all sizes: some minutes
    python -m benchmarks.cost_of_scale --sizes 16 32      # these anew, the others stay
    python -m benchmarks.cost_of_scale --quick            # 1, 2 and 4 processes, nothing written

Starts so many processes on this machine, one device each, as torchrun would. Each measures its
imports, `iso.init_distributed`, the first and later exchanges, a comparison of what ranks are
given, the first program over all, a save and a restore (`benchmarks.hosts.rank_work`).

Seconds grow here with the processes because they share the cores. So what is looked at is free of
that: requests to the coordination service and their bytes, operations on the storage, files,
memory, connections, and seconds of the processor in each rank. How these grow is fitted to 2 to 8
processes (`benchmarks.hosts.growth`), tried on 16 and 32, and said for machines of which each has
one process to itself:

- each rank has the processor's time that it has here; imports come from a local disk;
- a request takes `ROUND_TRIP` seconds on the way, and a rank makes its requests one after another;
- a phase takes as long as its busiest rank computes, and its requests take on the way;
- the storage serves all ranks at once: what it takes to serve so many is not in the model.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.hosts.growth import Growth, error, fitted
from benchmarks.hosts.hosts_figure import draw
from tools.harness import calls, results, tables, timing
from tools.harness.command import Benchmark

SIZES = (1, 2, 4, 8, 16, 32)
FITTED, TRIED, FORETOLD = (2, 4, 8), (16, 32), (64, 256, 1024)
ROUND_TRIP = 0.0005
"""Seconds between two machines of a cluster, there and back; assumed."""
REPEATS = 30
LIMIT = 600
PHASES = (
    "imports",
    "rendezvous",
    "first exchange",
    "steady exchange",
    "first shard",
    "steady shard",
    "first program",
    "comparison",
    "request",
    "save",
    "restore",
)
ONCE = ("imports", "rendezvous", "first exchange", "first program", "comparison", "save", "restore")
"""The phases whose seconds are shown."""
FIGURE = Path(__file__).resolve().parents[1] / "docs" / "cost_of_scale.svg"


class Quantity(NamedTuple):
    """A number of a run.

    Attributes:
        phase: in which it is measured; "" for the process at its end.
        field: see `rank_work.measure`.
        of: "a rank" (the median), "busiest" (the most), or "all" (the sum).
        unit: what is divided by, for the table.
        form: of it.
        slack: as for `fitted`; the processor's time and memory are not the same twice.
    """

    phase: str
    field: str
    of: str
    unit: float = 1.0
    form: str = "{:,.0f}"
    slack: float = 0.02


_MS, _S = (1e-3, "{:,.1f}", 0.1), (1.0, "{:,.2f}", 0.1)
QUANTITIES = {
    "imports: processor, s": Quantity("imports", "cpu", "a rank", *_S),
    "rendezvous: requests": Quantity("rendezvous", "requests", "a rank"),
    "rendezvous: processor, ms": Quantity("rendezvous", "cpu", "a rank", *_MS),
    "rendezvous: processor, ms, busiest": Quantity("rendezvous", "cpu", "busiest", *_MS),
    "first exchange: requests": Quantity("first exchange", "requests", "a rank"),
    "steady exchange: requests": Quantity("steady exchange", "requests", "a rank"),
    "comparison: requests": Quantity("comparison", "requests", "a rank"),
    "comparison: requests, busiest": Quantity("comparison", "requests", "busiest", slack=0.3),
    "comparison: requests, all": Quantity("comparison", "requests", "all"),
    "comparison: bytes": Quantity("comparison", "bytes", "a rank", slack=0.1),
    "comparison: processor, ms": Quantity("comparison", "cpu", "a rank", *_MS),
    "comparison: processor, ms, busiest": Quantity("comparison", "cpu", "busiest", *_MS),
    "first program: processor, ms": Quantity("first program", "cpu", "a rank", *_MS),
    "save: requests": Quantity("save", "requests", "a rank"),
    "save: requests, busiest": Quantity("save", "requests", "busiest", slack=0.3),
    "save: operations on storage": Quantity("save", "storage", "a rank", slack=0.3),
    "save: operations on storage, busiest": Quantity("save", "storage", "busiest", slack=0.3),
    "save: files, all": Quantity("", "saved", "all"),
    "restore: requests": Quantity("restore", "requests", "a rank", slack=0.3),
    "restore: operations on storage": Quantity("restore", "storage", "a rank", slack=0.3),
    "restore: kB of the manifest": Quantity("", "manifest", "a rank", 1e3, "{:,.1f}"),
    "peak memory, MiB": Quantity("", "peak", "a rank", 2**20, "{:,.0f}", 0.05),
    "peak memory, MiB, busiest": Quantity("", "peak", "busiest", 2**20, "{:,.0f}", 0.05),
    "open files and connections": Quantity("", "files", "a rank"),
    "open files and connections, busiest": Quantity("", "files", "busiest"),
    "threads, busiest": Quantity("", "threads", "busiest", slack=0.1),
}


def main() -> None:
    """Measure, and write what was found."""
    benchmark = Benchmark("cost_of_scale", __doc__, quick=1, docs=("clusters.md", markdown))
    benchmark.add("--sizes", type=int, nargs="+", choices=SIZES, help="processes; default: all")
    given = benchmark.parse()
    found: dict[str, Any] = {}
    for size in given.sizes or ((1, 2, 4) if given.quick else SIZES):
        tables.show(f"{size} processes ..")
        found[str(size)] = summary(launch(size))
    found["alone"] = timing.summary(
        calls.call("benchmarks.hosts.rank_work:shard_alone", 300, limit=120), "off"
    )
    kept = {**results.saved(benchmark.name), **found}
    if given.quick:
        tables.show(*(f"{n}: {kept[n]}" for n in found))
    elif missing := [n for n in SIZES if str(n) not in kept]:
        results.save(benchmark.name, kept)
        tables.show(f"no tables yet: {missing} have not been measured")
    else:
        benchmark.finish(found, merge=True)
        FIGURE.write_text(draw(growths(kept)))


def launch(size: int, repeats: int = REPEATS, limit: float = LIMIT) -> list[dict[str, Any]]:
    """Start ranks with torchrun's environment, and wait for what they measure.

    Args:
        size: how many.
        repeats: see `rank_work.measure`.
        limit: seconds, after which all are ended.

    Returns:
        The report of each rank.
    """
    each = [{**one, "JAX_PLATFORMS": "cpu"} for one in calls.ranks(size)]
    with tempfile.TemporaryDirectory() as folder:
        work = "benchmarks.hosts.rank_work:measure"
        return calls.together(work, folder, repeats, variables=each, limit=limit)


def summary(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pool what ranks measured.

    Args:
        reports: of each rank.

    Returns:
        By phase and field, and under "" of the process, three numbers: of "a rank" (the median),
        the "busiest", and "all" together.
    """
    found: dict[str, Any] = {}
    for phase in PHASES:
        told = [report["phases"][phase] for report in reports]
        found[phase] = {field: _pooled([one[field] for one in told]) for field in told[0]}
    fields = ("rss", "peak", "files", "threads", "saved", "manifest")
    found[""] = {field: _pooled([report[field] for report in reports]) for field in fields}
    return found


def values(runs: Mapping[str, Any], sizes: Sequence[int], quantity: Quantity) -> list[float]:
    """A quantity for each number of processes.

    Args:
        runs: by number of processes, as `summary` gives them.
        sizes: which.
        quantity: what.
    """
    return [runs[str(n)][quantity.phase][quantity.field][quantity.of] for n in sizes]


def growth_of(runs: Mapping[str, Any], quantity: Quantity) -> Growth:
    """How a quantity grows, by the fewest processes."""
    return fitted(FITTED, values(runs, FITTED, quantity), quantity.slack)


def growths(runs: Mapping[str, Any]) -> dict[str, tuple[dict[int, float], Growth]]:
    """By quantity what was measured, and how it grows."""
    return {
        name: (dict(zip(SIZES, values(runs, SIZES, one), strict=True)), growth_of(runs, one))
        for name, one in QUANTITIES.items()
    }


def seconds_on_hosts(runs: Mapping[str, Any], phase: str, n: int) -> float:
    """What a phase takes where each rank has a machine: see the module.

    Args:
        runs: as for `values`.
        phase: which.
        n: how many machines.
    """
    busiest = growth_of(runs, Quantity(phase, "cpu", "busiest", slack=0.1)).at(n)
    requests = growth_of(runs, Quantity(phase, "requests", "a rank", slack=0.3)).at(n)
    return busiest + requests * ROUND_TRIP


def seconds_here(runs: Mapping[str, Any], phase: str, n: int, cores: int = 2) -> float:
    """What a phase would take if it were nothing but the processor's time, on shared cores."""
    return growth_of(runs, Quantity(phase, "cpu", "a rank", slack=0.1)).at(n) * max(1, n / cores)


def markdown(runs: dict[str, Any]) -> str:
    """The tables of docs/clusters.md.

    Args:
        runs: the results.
    """
    rows = []
    for name, one in QUANTITIES.items():
        growth = growth_of(runs, one)
        off = error(growth, TRIED, values(runs, TRIED, one))
        told = [*values(runs, SIZES, one), *(growth.at(n) for n in FORETOLD)]
        cells = [one.form.format(value / one.unit) for value in told]
        rows.append([name, *cells[: len(SIZES)], growth.shape, f"{off:.0%}", *cells[len(SIZES) :]])
    titles = ["a rank, or as it says", *map(str, SIZES), "grows as", "off by", *_named(FORETOLD)]
    first = tables.markdown(titles, rows, right=True)
    rows = []
    for phase in ONCE:
        wall = Quantity(phase, "seconds", "busiest")
        told = [f"{value:.3g}" for value in values(runs, SIZES, wall)]
        model = [f"{seconds_here(runs, phase, n):.3g}" for n in TRIED]
        hosts = [f"{seconds_on_hosts(runs, phase, n):.3g}" for n in FORETOLD]
        rows.append([phase, *told, *model, *hosts])
    titles = ["seconds, here", *map(str, SIZES), *(f"processor alone, {n}" for n in TRIED)]
    titles += [f"{n} machines, by model" for n in _named(FORETOLD)]
    return f"{first}\n\n{tables.markdown(titles, rows, right=True)}"


def _named(sizes: Sequence[int]) -> list[str]:
    return [f"{n:,}" for n in sizes]


def _pooled(numbers: Sequence[float]) -> dict[str, float]:
    return {"a rank": statistics.median(numbers), "busiest": max(numbers), "all": sum(numbers)}


if __name__ == "__main__":
    main()
