"""Benchmark: do training steps on this host cost what was planned, and is the found plan the best?

    python -m benchmarks.planned_steps [MLP-torch] [MLP-flax] [Llama-torch] [..] [--quick]
    python -m benchmarks.planned_steps --sizes

Two models, each in torch and in NNX with the same weights (`benchmarks.models.twins`), train on 8
virtual devices under six plans that people write by hand and under the one that
`iso.planner.search` finds. For each:

- `iso.planner.estimate` predicts the seconds of a step at depth "trace" and "partition", with the
  rates that this host was measured to have at the start; both are compared with measured steps by
  rank (Spearman);
- losses of all plans and both frameworks are compared with those of one device, without any plan;
- the collectives of the program that ran, by kind, axes and bytes, with those of the report.

Steps are measured in three processes, one after the other. In each they run in turns of four, in
random order, and the first of a turn does not count. What a plan takes in a process is the lower
quartile of its steps; what it takes is the median of that over processes, and so is a ratio of two
plans. One plan is trained twice in each: how far its two times are apart is the noise. Each
workload may be a run of its own; results of the others are kept.

No constant is fitted. Sizes were taken by predictions alone, of eight of each model those at which
the six plans are told farthest apart: see `benchmarks.planned_sizes`, which `--sizes` runs.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import isoshard as iso
from benchmarks import planned_sizes
from benchmarks.models.twins import Twins
from benchmarks.planned_tables import markdown, shown
from benchmarks.planned_training import (
    AGAIN,
    DEVICES,
    FRAMEWORKS,
    MODELS,
    Layout,
    alone,
    hand_layouts,
    planned,
    sent,
)
from benchmarks.planning_ranking import spearman
from isoshard.planner.machine.measured_cpu import host_rates
from tools.harness import calls, results, timing
from tools.harness.command import Benchmark

DEPTHS = ("trace", "partition")
PROCESSES, LIMIT = 3, 300
"""In so many it is measured, each of which is ended after so many seconds."""

Collectives = collections.Counter[tuple[Any, ...]]
"""Kind, axes, bytes of the result -> how often."""


def foretold(report: iso.planner.Report) -> Collectives:
    """The collectives of a report: kind, axes, bytes of the result -> how often.

    Args:
        report: of an estimate.
    """
    found = Collectives()
    for one in report.collectives:
        # A report has the bytes of a reduce-scatter's operand.
        size = one.bytes
        if one.kind == "reduce-scatter":
            size //= int(np.prod([report.mesh[axis] for axis in one.axes]))
        found[one.kind, one.axes, size] += one.count
    return found


def told(twins: Twins, framework: str, layout: Layout) -> tuple[dict[str, Any], Collectives]:
    """Predict a step under a plan.

    Args:
        twins: the model.
        framework: one of `FRAMEWORKS`.
        layout: the plan.

    Returns:
        Predicted milliseconds, and collectives by depth "partition".
    """
    step, args = planned(twins, framework, layout)
    row: dict[str, Any] = {"mesh": dict(layout.mesh.shape)}
    how: Any = {"repeats": False, "progress": False}
    for depth in DEPTHS:
        report = iso.planner.estimate(step, args, layout.mesh, layout.plan, depth=depth, **how)
        row[f"{depth}_ms"] = report.time.serial * 1e3
    return row, foretold(report)


def compared(
    said: Collectives, runs: Sequence[Mapping[str, Any]], reference: Sequence[float]
) -> dict[str, Any]:
    """What a plan did in each process, beside what was told.

    Args:
        said: collectives, as told.
        runs: what `planned_training.measured` gave of the plan, by process.
        reference: losses of `alone`.
    """
    every = [
        Collectives({(kind, tuple(axes), size): count for kind, axes, size, count in one["ran"]})
        for one in runs
    ]
    ran = max(every, key=lambda one: ((one - said) + (said - one)).total())
    quartiles = [timing.quartile(one["seconds"]) * 1e3 for one in runs]
    return {
        "losses": runs[0]["losses"],
        "apart": max(apart(one["losses"], reference) for one in runs),
        "collectives": ran.total(),
        "sent_mib": sum(size * count for (_, _, size), count in ran.items()) / 2**20,
        "ran only": _listed(ran - said),
        "said only": _listed(said - ran),
        "differ": ((ran - said) + (said - ran)).total(),
        "step_ms": statistics.median(quartiles),
        "processes_ms": quartiles,
        "median_ms": statistics.median(statistics.median(one["seconds"]) * 1e3 for one in runs),
        "best_ms": min(min(one["seconds"]) for one in runs) * 1e3,
    }


def found_layout(twins: Twins, framework: str) -> tuple[Layout, list[str]]:
    """The plan that the search finds, and what it says of it.

    Args:
        twins: the model.
        framework: one of `FRAMEWORKS`.
    """
    step, args = planned(twins, framework, next(iter(hand_layouts(twins.name).values())))
    found = iso.planner.search(step, args, DEVICES)
    return Layout(found.mesh, found.plan), str(found).splitlines()


def measure(
    name: str, framework: str, sizes: dict[str, int], *, rounds: int, processes: int = PROCESSES
) -> dict[str, Any]:
    """Predict, train and time one model of one framework under all plans.

    Args:
        name: of the model.
        framework: one of `FRAMEWORKS`.
        sizes: of the model.
        rounds: timed turns of each plan in a process.
        processes: how many, one after the other.

    Raises:
        calls.Failed: a process ended without a result, or took more than `LIMIT` seconds.
    """
    twins, layouts = MODELS[name][0](**sizes), hand_layouts(name)
    layouts["found"], said = found_layout(twins, framework)
    foretold_of = {one: told(twins, framework, layout) for one, layout in layouts.items()}
    runs = list[Any]()
    for number in range(processes):
        print(f"timing {name}-{framework}, process {number + 1} of {processes}", flush=True)
        given = (name, framework, sizes, sent(layouts), rounds, number)
        runs.append(calls.call("benchmarks.planned_training:measured", *given, limit=LIMIT))
    reference = alone(twins)
    rows = {
        one: row | compared(collectives, [run[one] for run in runs], reference)
        for one, (row, collectives) in foretold_of.items()
    }
    hand = [row for one, row in rows.items() if one != "found"]
    rank = {
        depth: spearman([row[f"{depth}_ms"] for row in hand], [row["step_ms"] for row in hand])
        for depth in DEPTHS
    }
    best = min(set(rows) - {"found"}, key=lambda one: rows[one]["step_ms"])
    ratios = [_ratio(run, "found", best) for run in runs]
    twice = [_ratio(run, "again", AGAIN) for run in runs]
    return {
        "plan": said,
        "reference": reference,
        "rows": rows,
        "spearman": rank,
        "best by hand": best,
        "found / best by hand": statistics.median(ratios),
        "found / best, processes": ratios,
        "again": statistics.median(twice),
        "again, processes": twice,
        "rates": _plain(vars(host_rates())),
    }


def _plain(rates: Any) -> Any:
    if not isinstance(rates, Mapping):
        return rates
    return {one: _plain(rate) for one, rate in rates.items()}


def _ratio(run: Mapping[str, Any], one: str, other: str) -> float:
    return timing.quartile(run[one]["seconds"]) / timing.quartile(run[other]["seconds"])


def _listed(some: Collectives) -> list[str]:
    return sorted(f"{count} {kind} {axes} {size}" for (kind, axes, size), count in some.items())


def apart(one: list[float], other: list[float]) -> float:
    """The largest relative difference of losses.

    Args:
        one: losses of several steps.
        other: as many.
    """
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def main() -> None:
    """Run the benchmark and save `benchmarks/results/planned_steps.json`.

    Workloads that are not named keep the figures of the run before.
    """
    iso.simulate_devices(DEVICES)
    benchmark = Benchmark(
        "planned_steps", __doc__, rounds=6, quick=1, docs=("planning.md", markdown)
    )
    benchmark.add_workloads([f"{name}-{one}" for name in MODELS for one in FRAMEWORKS])
    benchmark.add("--processes", type=int, default=PROCESSES, help="in which steps are measured")
    benchmark.add("--sizes", action="store_true", help="only say how far apart plans are told")
    given = benchmark.parse()
    print(f"rates {host_rates()}", flush=True)
    if given.sizes:
        planned_sizes.show()
        return
    found, lines = dict[str, Any](), list[Any]()
    for workload in given.workloads:
        name, _, framework = workload.partition("-")
        _, sizes, small = MODELS[name]
        sizes = small if given.quick else sizes
        how = {"rounds": given.rounds, "processes": given.processes}
        facts = measure(name, framework, sizes, **how)
        found[workload] = {"sizes": sizes, **facts, "measured": results.circumstances()}
        lines += shown(workload, facts)
    benchmark.finish(found, *lines, merge=True)


if __name__ == "__main__":
    main()
