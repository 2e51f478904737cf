"""Benchmark: do training steps on this host cost what was planned, and is the found plan the best?

    python -m benchmarks.planned_steps [MLP-torch] [MLP-flax] [Llama-torch] [..] [--quick]
    python -m benchmarks.planned_steps --sizes

Two models, each in torch and in NNX with the same weights (`benchmarks.models.model_pair`), train
on 8 virtual devices under six plans that people write by hand and under the one that
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
from benchmarks.models.model_pair import ModelPair
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


def predicted(report: iso.planner.Report) -> Collectives:
    """The collectives of a report: kind, axes, bytes of the result -> how often.

    Args:
        report: of an estimate.
    """
    collectives = Collectives()
    for collective in report.collectives:
        # A report has the bytes of a reduce-scatter's operand.
        size = collective.bytes
        if collective.kind == "reduce-scatter":
            size //= int(np.prod([report.mesh[axis] for axis in collective.axes]))
        collectives[collective.kind, collective.axes, size] += collective.count
    return collectives


def estimated(
    models: ModelPair, framework: str, layout: Layout
) -> tuple[dict[str, Any], Collectives]:
    """Predict a step under a plan.

    Args:
        models: the model.
        framework: one of `FRAMEWORKS`.
        layout: the plan.

    Returns:
        Predicted milliseconds, and collectives by depth "partition".
    """
    step, args = planned(models, framework, layout)
    row: dict[str, Any] = {"mesh": dict(layout.mesh.shape)}
    how: Any = {"repeats": False, "progress": False}
    for depth in DEPTHS:
        report = iso.planner.estimate(step, args, layout.mesh, layout.plan, depth=depth, **how)
        row[f"{depth}_ms"] = report.time.serial * 1e3
    return row, predicted(report)


def compared(
    estimate: Collectives, runs: Sequence[Mapping[str, Any]], reference: Sequence[float]
) -> dict[str, Any]:
    """What a plan did in each process, beside what was told.

    Args:
        estimate: collectives, as told.
        runs: what `planned_training.measured` gave of the plan, by process.
        reference: losses of `alone`.
    """
    every = [
        Collectives({(kind, tuple(axes), size): count for kind, axes, size, count in run["ran"]})
        for run in runs
    ]
    ran = max(every, key=lambda counts: ((counts - estimate) + (estimate - counts)).total())
    quartiles = [timing.quartile(run["seconds"]) * 1e3 for run in runs]
    return {
        "losses": runs[0]["losses"],
        "apart": max(difference(run["losses"], reference) for run in runs),
        "collectives": ran.total(),
        "sent_mib": sum(size * count for (_, _, size), count in ran.items()) / 2**20,
        "ran only": _listed(ran - estimate),
        "said only": _listed(estimate - ran),
        "differ": ((ran - estimate) + (estimate - ran)).total(),
        "step_ms": statistics.median(quartiles),
        "processes_ms": quartiles,
        "median_ms": statistics.median(statistics.median(run["seconds"]) * 1e3 for run in runs),
        "best_ms": min(min(run["seconds"]) for run in runs) * 1e3,
    }


def searched_layout(models: ModelPair, framework: str) -> tuple[Layout, list[str]]:
    """The plan that the search finds, and what it says of it.

    Args:
        models: the model.
        framework: one of `FRAMEWORKS`.
    """
    step, args = planned(models, framework, next(iter(hand_layouts(models.name).values())))
    report = iso.planner.search(step, args, DEVICES)
    return Layout(report.mesh, report.plan), str(report).splitlines()


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
    models, layouts = MODELS[name][0](**sizes), hand_layouts(name)
    layouts["found"], notes = searched_layout(models, framework)
    estimates = {
        name_of: estimated(models, framework, layout) for name_of, layout in layouts.items()
    }
    runs = list[Any]()
    for number in range(processes):
        print(f"timing {name}-{framework}, process {number + 1} of {processes}", flush=True)
        options = (name, framework, sizes, sent(layouts), rounds, number)
        runs.append(calls.call("benchmarks.planned_training:measured", *options, limit=LIMIT))
    reference = alone(models)
    rows = {
        name_of: row | compared(collectives, [run[name_of] for run in runs], reference)
        for name_of, (row, collectives) in estimates.items()
    }
    hand = [row for name_of, row in rows.items() if name_of != "found"]
    rank = {
        depth: spearman([row[f"{depth}_ms"] for row in hand], [row["step_ms"] for row in hand])
        for depth in DEPTHS
    }
    best = min(set(rows) - {"found"}, key=lambda name_of: rows[name_of]["step_ms"])
    ratios = [_ratio(run, "found", best) for run in runs]
    twice = [_ratio(run, "again", AGAIN) for run in runs]
    return {
        "plan": notes,
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
    return {key: _plain(rate) for key, rate in rates.items()}


def _ratio(run: Mapping[str, Any], name: str, other: str) -> float:
    return timing.quartile(run[name]["seconds"]) / timing.quartile(run[other]["seconds"])


def _listed(some: Collectives) -> list[str]:
    return sorted(f"{count} {kind} {axes} {size}" for (kind, axes, size), count in some.items())


def difference(losses: list[float], other: list[float]) -> float:
    """The largest relative difference of losses.

    Args:
        losses: losses of several steps.
        other: as many.
    """
    return max(abs(a - b) / abs(b) for a, b in zip(losses, other, strict=True))


def main() -> None:
    """Run the benchmark and save `benchmarks/results/planned_steps.json`.

    Workloads that are not named keep the figures of the run before.
    """
    iso.simulate_devices(DEVICES)
    benchmark = Benchmark(
        "planned_steps", __doc__, rounds=6, quick=1, docs=("planning.md", markdown)
    )
    benchmark.add_workloads([f"{name}-{framework}" for name in MODELS for framework in FRAMEWORKS])
    benchmark.add("--processes", type=int, default=PROCESSES, help="in which steps are measured")
    benchmark.add("--sizes", action="store_true", help="only say how far apart plans are told")
    options = benchmark.parse()
    print(f"rates {host_rates()}", flush=True)
    if options.sizes:
        planned_sizes.show()
        return
    rows, lines = dict[str, Any](), list[Any]()
    for workload in options.workloads:
        name, _, framework = workload.partition("-")
        _, sizes, small = MODELS[name]
        sizes = small if options.quick else sizes
        how = {"rounds": options.rounds, "processes": options.processes}
        facts = measure(name, framework, sizes, **how)
        rows[workload] = {"sizes": sizes, **facts, "measured": results.circumstances()}
        lines += shown(workload, facts)
    benchmark.finish(rows, *lines, merge=True)


if __name__ == "__main__":
    main()
