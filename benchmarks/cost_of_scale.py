"""Benchmark: what a run of many processes costs each of them, from 1 to 32, and by model to 1,024.

    python -m benchmarks.cost_of_scale                    # all sizes: some minutes
    python -m benchmarks.cost_of_scale --sizes 16 32      # these anew, the others stay
    python -m benchmarks.cost_of_scale --quick            # 1, 2 and 4 processes, nothing written

Starts so many processes on this machine, one device each, as torchrun would. Each measures its
imports, `iso.distributed.init_distributed`, the first and later exchanges, a comparison of what
ranks are given, the first program over all, a save and a restore (`benchmarks.hosts.rank_work`).

Seconds grow here with the processes because they share the cores. So what is looked at is free of
that: requests to the coordination service and their bytes, operations on the storage, files,
memory, connections, and seconds of the processor in each rank. How these grow is fitted to 2 to 8
processes (`benchmarks.hosts.growth`) and tried on 16 and 32; then fitted to all of them, and said
for machines of which each has one process to itself:

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
FITTED, TRIED, EXTRAPOLATED = (2, 4, 8), (16, 32), (64, 256, 1024)
MEASURED = FITTED + TRIED  # a process alone has nobody to talk to
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
SHOWN = {
    "imports and rendezvous": ("imports", "rendezvous"),
    "first exchange": ("first exchange",),
    "first program": ("first program",),
    "comparison": ("comparison",),
    "save": ("save",),
    "restore": ("restore",),
}
"""What seconds are shown of; ranks that have imported wait in the rendezvous for the others."""
FIGURE = Path(__file__).resolve().parents[1] / "docs" / "cost_of_scale.svg"


class Quantity(NamedTuple):
    """A number of a run.

    Attributes:
        phase: in which it is measured; "" for the process at its end.
        field: see `rank_work.measure`.
        of: "a rank" (the lower median), "busiest" (the most), or "all" (the sum).
        unit: what is divided by, for the table.
        form: of it.
        slack: as for `fitted`.
        shapes: likewise; what is measured and not counted is not the same twice, and grows with the
            processes or does not.
    """

    phase: str
    field: str
    of: str
    unit: float = 1.0
    form: str = "{:,.0f}"
    slack: float = 0.02
    shapes: tuple[str, ...] = ("constant", "log n", "n", "n²")

    @property
    def counted(self) -> bool:
        """Whether it is a number that is the same each time, but for who came last."""
        return self.field in ("requests", "storage", "saved", "manifest", "files")


def processor(phase: str, of: str, *shapes: str, unit: float = 1e-3) -> Quantity:
    """Seconds of the processor in a phase; the slack is what repeats differ by."""
    form = "{:,.1f}" if unit < 1 else "{:,.2f}"
    return Quantity(phase, "cpu", of, unit, form, 0.1, shapes or ("constant", "n"))


QUANTITIES = {
    "imports: processor, s": processor("imports", "a rank", "constant", unit=1.0),
    "rendezvous: requests": Quantity("rendezvous", "requests", "a rank"),
    "rendezvous: processor, ms": processor("rendezvous", "a rank"),
    "rendezvous: processor, ms, busiest": processor("rendezvous", "busiest"),
    "first exchange: requests": Quantity("first exchange", "requests", "a rank"),
    "first exchange: processor, ms, busiest": processor("first exchange", "busiest"),
    "steady exchange: requests": Quantity("steady exchange", "requests", "a rank"),
    "first program: processor, ms": processor("first program", "a rank"),
    "first program: processor, ms, busiest": processor(
        "first program", "busiest", "constant", "n", "n²"
    ),
    "comparison: requests": Quantity("comparison", "requests", "a rank", slack=0.1),
    "comparison: requests, busiest": Quantity("comparison", "requests", "busiest", slack=0.2),
    "comparison: requests, all": Quantity("comparison", "requests", "all"),
    "comparison: bytes": Quantity("comparison", "bytes", "a rank", slack=0.1),
    "comparison: processor, ms": processor("comparison", "a rank", "constant", "log n", "n"),
    "comparison: processor, ms, busiest": processor("comparison", "busiest"),
    "save: requests": Quantity("save", "requests", "a rank", slack=0.1),
    "save: requests, busiest": Quantity("save", "requests", "busiest", slack=0.1),
    "save: operations on storage": Quantity("save", "storage", "a rank", slack=0.2),
    "save: operations on storage, busiest": Quantity("save", "storage", "busiest", slack=0.1),
    "save: files, all": Quantity("", "saved", "all"),
    "save: processor, ms, busiest": processor("save", "busiest"),
    "restore: requests": Quantity("restore", "requests", "a rank", slack=0.1),
    "restore: operations on storage": Quantity("restore", "storage", "a rank", slack=0.2),
    "restore: kB of the manifest": Quantity("", "manifest", "a rank", 1e3, "{:,.1f}"),
    "restore: processor, ms, busiest": processor("restore", "busiest"),
    "peak memory, MiB": Quantity("", "peak", "a rank", 2**20, slack=0.05),
    "peak memory, MiB, busiest": Quantity("", "peak", "busiest", 2**20, slack=0.05),
    "open files and connections": Quantity("", "files", "a rank"),
    "open files and connections, busiest": Quantity("", "files", "busiest"),
    "threads, busiest": Quantity("", "threads", "busiest", slack=0.1),
}


def main() -> None:
    """Measure, and write what was found."""
    benchmark = Benchmark("cost_of_scale", __doc__, quick=1, docs=("clusters.md", markdown))
    benchmark.add("--sizes", type=int, nargs="+", choices=SIZES, help="processes; default: all")
    options = benchmark.parse()
    kept = results.saved(benchmark.name)
    alone = calls.call("benchmarks.hosts.rank_work:shard_alone", 300, limit=120)
    records: dict[str, Any] = {"alone": timing.summary(alone, "off")}
    for size in options.sizes or ((1, 2, 4) if options.quick else SIZES):
        tables.show(f"{size} processes ..")
        records[str(size)] = summary(launch(size))
        if not options.quick:
            results.save(benchmark.name, {**kept, **records})
    kept |= records
    if options.quick:
        tables.show(*(f"{n}: {kept[n]}" for n in records))
    elif missing := [n for n in SIZES if str(n) not in kept]:
        tables.show(f"no tables yet: {missing} have not been measured")
    else:
        benchmark.finish(records, merge=True)
        FIGURE.write_text(draw(growths(kept)))


def launch(
    size: int, repeats: int = REPEATS, limit: float = LIMIT, patience: float | None = None
) -> list[dict[str, Any]]:
    """Start ranks with torchrun's environment, and wait for what they measure.

    Args:
        size: how many.
        repeats: see `rank_work.measure`.
        limit: seconds, after which all are ended.
        patience: see `rank_work.measure`.

    Returns:
        The report of each rank.
    """
    each = [{**rank, "JAX_PLATFORMS": "cpu"} for rank in calls.ranks(size)]
    with tempfile.TemporaryDirectory() as folder:
        work = "benchmarks.hosts.rank_work:measure"
        return calls.together(work, folder, repeats, patience, variables=each, limit=limit)


def summary(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pool what ranks measured.

    Args:
        reports: of each rank.

    Returns:
        By phase and field, and under "" of the process, three numbers: of "a rank" (the lower
        median), the "busiest", and "all" together.
    """
    phases: dict[str, Any] = {}
    for phase in PHASES:
        measured = [report["phases"][phase] for report in reports]
        phases[phase] = {
            field: _pooled([record[field] for record in measured]) for field in measured[0]
        }
    fields = ("rss", "peak", "files", "threads", "saved", "manifest")
    phases[""] = {field: _pooled([report[field] for report in reports]) for field in fields}
    return phases


def values(runs: Mapping[str, Any], sizes: Sequence[int], quantity: Quantity) -> list[float]:
    """A quantity for each number of processes.

    Args:
        runs: by number of processes, as `summary` gives them.
        sizes: which.
        quantity: what.
    """
    return [runs[str(n)][quantity.phase][quantity.field][quantity.of] for n in sizes]


def growth_of(
    runs: Mapping[str, Any], quantity: Quantity, sizes: Sequence[int] = MEASURED
) -> Growth:
    """How a quantity grows, by so many processes."""
    return fitted(sizes, values(runs, sizes, quantity), quantity.slack, quantity.shapes)


def missed_by(runs: Mapping[str, Any], quantity: Quantity) -> float:
    """How far the fit to `FITTED` is from what was measured with `TRIED`, at most."""
    return error(growth_of(runs, quantity, FITTED), TRIED, values(runs, TRIED, quantity))


def growths(runs: Mapping[str, Any]) -> dict[str, tuple[dict[int, float], Growth]]:
    """By quantity what was measured, and how it grows."""
    return {
        name: (
            dict(zip(SIZES, values(runs, SIZES, quantity), strict=True)),
            growth_of(runs, quantity),
        )
        for name, quantity in QUANTITIES.items()
    }


def seconds_on_hosts(runs: Mapping[str, Any], phase: str, n: int) -> float:
    """What a phase takes where each rank has a machine: see the module.

    Args:
        runs: as for `values`.
        phase: which.
        n: how many machines.
    """
    shapes = ("constant",) if phase == "imports" else ("constant", "n")  # once for each other rank
    busiest = growth_of(runs, processor(phase, "busiest", *shapes)).at(n)
    requests = growth_of(runs, Quantity(phase, "requests", "a rank", slack=0.2)).at(n)
    return busiest + requests * ROUND_TRIP


def seconds_here(runs: Mapping[str, Any], phase: str, n: int, cores: int = 2) -> float:
    """What a phase takes by the processor's time of all ranks, fitted to `FITTED`, on these cores.

    Args:
        runs: as for `values`.
        phase: which.
        n: how many processes.
        cores: that they share.
    """
    return growth_of(runs, processor(phase, "all", "n", "n²"), FITTED).at(n) / cores


def markdown(runs: dict[str, Any]) -> str:
    """The tables of docs/clusters.md.

    Args:
        runs: the results.
    """
    rows = []
    for name, quantity in QUANTITIES.items():
        growth = growth_of(runs, quantity)
        figures = [*values(runs, SIZES, quantity), *(growth.at(n) for n in EXTRAPOLATED)]
        cells = [quantity.form.format(value / quantity.unit) for value in figures]
        off = f"{missed_by(runs, quantity):.0%}"
        rows.append([name, *cells[: len(SIZES)], growth.shape, off, *cells[len(SIZES) :]])
    titles = [
        "per rank unless noted",
        *map(str, SIZES),
        "grows as",
        "off by",
        *_named(EXTRAPOLATED),
    ]
    first = tables.markdown(titles, rows, right=True)
    rows = []
    for name, phases in SHOWN.items():
        wall = [values(runs, SIZES, Quantity(phase, "seconds", "a rank")) for phase in phases]
        here = [[seconds_here(runs, phase, n) for n in TRIED] for phase in phases]
        hosts = [[seconds_on_hosts(runs, phase, n) for n in EXTRAPOLATED] for phase in phases]
        figures = [
            sum(column) for part in (wall, here, hosts) for column in zip(*part, strict=True)
        ]
        rows.append([name, *(f"{value:.2g}" for value in figures)])
    titles = ["seconds", *map(str, SIZES), *(f"predicted, {n}" for n in TRIED)]
    titles += [f"{n} machines" for n in _named(EXTRAPOLATED)]
    return f"{first}\n\n{tables.markdown(titles, rows, right=True)}"


def _named(sizes: Sequence[int]) -> list[str]:
    return [f"{n:,}" for n in sizes]


def _pooled(numbers: Sequence[float]) -> dict[str, float]:
    return {"a rank": statistics.median_low(numbers), "busiest": max(numbers), "all": sum(numbers)}


if __name__ == "__main__":
    main()
