"""Benchmark: the plan that a search finds, against plans written by hand.

    python -m benchmarks.planning_search [MLP] [Llama] .. [--on v5e:2x4 ..] [--missing] [--quick]

For each family of models and each machine: the cost of the found plan over that of the best hand
plan that fits (data, FSDP, tensor, FSDP x tensor, sequence, expert, over all meshes the search
looks at), both by the traced program with equal layers as loops, and the seconds that the search
took, of a clock and of the processor. A hand plan counts as it is, or with the batch kept split
behind blocks, whichever is better. What fits, fits with layers written out, too. Nothing runs on
devices. With --depth partition the best hand plan by tracing is compared by XLA's partitioner.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Mapping
from typing import Any, get_args

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.hand_plans import HandPlan, hand_plans
from benchmarks.planning_models import FAMILIES, Family
from isoshard.core.plan import Plan
from isoshard.core.traced.jax_steps import traced_jax_step
from isoshard.core.traced.traced_step import TracedStep
from isoshard.planner.machine.topologies import topology_of
from isoshard.planner.plan_search.analytic_cost import AnalyticCost, Choice
from isoshard.planner.plan_search.condensed_program import CondensedProgram
from isoshard.planner.plan_search.mesh_shapes import meshes_for
from isoshard.planner.plan_search.plan_cost import PlanCost, SearchDepth, by_kinds
from isoshard.planner.plan_search.plan_rules import forced_layouts
from isoshard.planner.plan_search.searched_step import SearchedStep, searched
from isoshard.planner.plan_search.searching import search
from tools.harness import results, tables
from tools.harness.command import Benchmark

MACHINES = ("v5e:2x4", "v5p:4x4x4", "h100:32x8", "v5e:16x16", "v5p:8x8x16", "v5p:16x16x16")
QUICK = ("v5e:2x4", "v5e:16x16")
OWN = {
    "mlp": Plan(
        {
            "*.*[02468].weight": ("model",),
            "*.*[13579].weight": (None, "model"),
            "*.*[02468].bias": ("model",),
            "*": None,
        }
    ),
    "images": Plan(
        {"*.conv1.*": ("model",), "*.conv2.weight": (None, "model"), "*": None},
    ),
    "tables": Plan({"tables.*.weight": ("model",), "*": None}),
}
"""Tensor parallelism as a user writes it for models without usual names."""


def by_hand(step: TracedStep, family: Family, where: Any) -> list[HandPlan]:
    """The hand plans over all meshes that the search looks at."""
    own = {"tensor": OWN[family.kind]} if family.kind in OWN else {}
    return hand_plans(step, meshes_for(where), own)


def costs_by_hand(
    step: SearchedStep, plan: HandPlan, capacity: int, depth: SearchDepth
) -> list[tuple[PlanCost, dict[str, NamedSharding]]]:
    """The costs of a hand plan: as it is, and with layouts behind blocks; and these."""
    if depth == "kinds":
        return [(kinds_of_layouts(step.program, plan.layouts, plan.mesh, capacity), {})]
    batch = [x for x in step.written.inputs if x.role == "input"]
    spec = max((plan.layouts[x.name].spec for x in batch if x.name in plan.layouts), key=len)
    behind = NamedSharding(plan.mesh, PartitionSpec(*spec[:2]))
    program = step.program
    blocks = {
        name: behind
        for name, modules in step.modules.items()
        if len(program.values[program.modules[modules]].shape) >= len(behind.spec)
        and not any(name.startswith(f"{other}.") for other in step.modules)
    }
    return [
        (step.cost(plan.layouts, plan.mesh, capacity, outputs), outputs) for outputs in ({}, blocks)
    ]


def best_by_hand(
    step: SearchedStep, plans: list[HandPlan], capacity: int, depth: SearchDepth = "trace"
) -> tuple[HandPlan | None, PlanCost | None]:
    """The fastest hand plan that fits."""
    costs = [
        (cost, outputs, plan)
        for plan in plans
        for cost, outputs in costs_by_hand(step, plan, capacity, depth)
        if cost.fits
    ]
    for cost, outputs, plan in sorted(costs, key=lambda each: each[0].seconds):
        if depth == "kinds":
            return plan, cost
        if step.as_written(cost, plan.layouts, plan.mesh, outputs).fits:
            if depth == "partition":
                cost = step.cost(plan.layouts, plan.mesh, capacity, outputs, depth)
            return plan, cost
    return None, None


def measure(family: Family, where: str, depth: SearchDepth = "trace") -> dict[str, Any]:
    """One row."""
    meshes = meshes_for(where)
    step = traced_jax_step(family.step, family.args, {}, meshes[0], name=family.name)
    start, busy = time.monotonic(), time.process_time()
    try:
        plans, why = search(family.step, family.args, where, depth=depth), ""
    except ValueError as error:
        plans, why = None, str(error)
    taken = {"seconds": time.monotonic() - start, "processor": time.process_time() - busy}
    capacity = topology_of(meshes[0]).chip.memory
    plan, cost = best_by_hand(searched(step), by_hand(step, family, where), capacity, depth)
    if plans is None:
        return {"fits": False, "why": why, "hand": None if plan is None else plan.name, **taken}
    return {
        "fits": True,
        "depth": depth,
        "mesh": dict(plans.mesh.shape),
        "plan": repr(plans.plan),
        "cost": plans.cost.seconds,
        "memory": plans.cost.memory,
        "capacity": plans.cost.capacity,
        "bound": plans.cost.seconds / plans.least_seconds,
        "hand": None if plan is None else f"{plan.name}, {tuple(plan.mesh.shape.values())}",
        "ratio": None if cost is None else plans.cost.seconds / cost.seconds,
        **taken,
    }


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of docs/benchmarks.md: found over by hand, and what searches of a row took.

    Args:
        results: what `measure` gave, by family, machine and depth.
    """
    rows_of = collections.defaultdict[tuple[str, str], dict[str, Mapping[str, Any]]](dict)
    for title, row in results.items():
        family, where, depth = title.rsplit(", ", 2)
        rows_of[family, depth][where] = row
    rows = []
    for family, depth in sorted(
        rows_of, key=lambda key: (list(FAMILIES).index(key[0]), key[1] != "trace")
    ):
        cells = rows_of[family, depth]
        taken = [row["processor"] for row in cells.values()]
        rows.append(
            [
                family if depth == "trace" else f'{family}, depth "{depth}"',
                *(_cell(cells[where]) if where in cells else "" for where in MACHINES),
                f"{min(taken):.1f} to {max(taken):.1f}" if len(taken) > 1 else f"{taken[0]:.1f}",
            ]
        )
    return tables.markdown(["found / by hand", *MACHINES, "a search, processor s"], rows)


def _cell(row: Mapping[str, Any]) -> str:
    if not row["fits"]:
        return "nothing fits" if row["hand"] is None else f"only by hand: {row['hand']}"
    return "no hand plan" if row["ratio"] is None else f"{row['ratio']:.2f}"


def kinds_of_layouts(
    program: CondensedProgram, layouts: Mapping[str, NamedSharding], mesh: Mesh, capacity: int
) -> PlanCost:
    """The cost by kinds of layouts of a plan by hand.

    Layouts of parameters and batch do not say along what is computed where they disagree; the best
    of what they may mean counts.
    """
    groups = program.dimensions.groups
    forced = forced_layouts(layouts, groups, mesh)
    cost = AnalyticCost(program, mesh, forced)
    of_axis: list[list[tuple[int, ...]]] = []
    for axis in range(len(cost.sizes)):
        batch: dict[int, None] = {}
        model: dict[int, None] = {}
        for index, layout in forced.items():
            group = groups[index]
            for dimension, split in zip(group.dimensions, layout, strict=True):
                if axis in split and dimension >= 0:
                    (batch if group.role == "input" else model)[dimension] = None
        orders = [(*batch,), (*model, *batch), (*batch, *model), (*model,)]
        of_axis.append(list(dict.fromkeys(orders)))
    none = (frozenset[int](),) * len(cost.sizes)
    result = [cost.of(Choice(split, none)) for split in itertools.product(*of_axis)]
    best = min(result, key=lambda each: (each.memory > capacity, each.seconds, each.memory))
    return by_kinds(best, mesh, capacity)


def main() -> None:
    """Run the benchmark and save `benchmarks/results/planning_search.json`."""
    benchmark = Benchmark("planning_search", __doc__, quick=1, docs=("benchmarks.md", markdown))
    benchmark.add_workloads(FAMILIES)
    benchmark.add("--depth", default="trace", choices=get_args(SearchDepth), help="of the search")
    benchmark.add("--on", nargs="*", help=f"machines; default: {', '.join(MACHINES)}")
    benchmark.add("--missing", action="store_true", help="only what is not saved yet")
    options = benchmark.parse()
    rows: dict[str, dict[str, Any]] = {}
    for name in options.workloads:
        for where in options.on or (QUICK if options.quick else MACHINES):
            title = f"{name}, {where}, {options.depth}"
            if options.missing and title in results.saved(benchmark.name):
                continue
            row = measure(FAMILIES[name](), where, options.depth)
            rows[title] = {**row, "measured": results.circumstances()}
            print(title, {k: v for k, v in row.items() if k != "plan"}, flush=True)
            benchmark.finish(rows, merge=True)
    columns = {
        "mesh": "{mesh}", "cost (s)": "{cost:.4g}", "best by hand": "{hand}",
        "over it": "{ratio:.3f}", "search (s)": "{seconds:.1f}", "processor (s)": "{processor:.1f}",
    }  # fmt: skip
    shown = {name: row for name, row in rows.items() if row["fits"] and row["hand"]}
    benchmark.finish(rows, tables.by_name("found, over by hand", columns, shown), merge=True)


if __name__ == "__main__":
    main()
