"""Benchmark: the plan that a search finds, against plans written by hand.

    python -m benchmarks.planning_search [MLP] [Llama] .. [--quick]

For each family of models and each machine: the cost of the found plan over that of the best hand
plan that fits (data, FSDP, tensor, FSDP x tensor, sequence, expert, over all meshes the search
looks at), both by the traced program (depth "trace", or "kinds" with --kinds), and the seconds that
the search took. A hand plan counts as it is, or with the batch kept split behind blocks, whichever
is better. Nothing runs on devices.
"""

from __future__ import annotations

import time
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.planning_models import FAMILIES, Family
from isoshard.core.plan import Plan
from isoshard.core.planner.plan_search.condensed_program import CondensedProgram, condensed
from isoshard.core.planner.plan_search.hand_plans import HandPlan, hand_plans
from isoshard.core.planner.plan_search.mesh_shapes import meshes_for
from isoshard.core.planner.plan_search.named_dimensions import named_dimensions
from isoshard.core.planner.plan_search.plan_cost import (
    PlanCost,
    SearchDepth,
    cost_of,
    kinds_of_layouts,
)
from isoshard.core.planner.plan_search.searching import search
from isoshard.core.planner.traced.jax_steps import traced_jax_step
from isoshard.core.planner.traced.traced_step import TracedStep
from tools.harness import tables
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


def cost_by_hand(
    step: TracedStep, program: CondensedProgram, one: HandPlan, capacity: int, depth: SearchDepth
) -> PlanCost:
    """The cost of a hand plan."""
    if depth == "kinds":
        return kinds_of_layouts(program, one.layouts, one.mesh, capacity)
    batch = [x for x in step.inputs if x.role == "input"]
    spec = max((one.layouts[x.name].spec for x in batch if x.name in one.layouts), key=len)
    behind = NamedSharding(one.mesh, PartitionSpec(*spec[:2]))
    blocks = {
        name: behind
        for name, kind in program.modules.items()
        if len(program.values[kind].shape) >= len(behind.spec)
        and not any(name.startswith(f"{other}.") for other in program.modules)
    }
    found = [
        cost_of(step, one.layouts, one.mesh, capacity, outputs=outputs) for outputs in ({}, blocks)
    ]
    return min(found, key=lambda cost: (not cost.fits, cost.seconds))


def best_by_hand(
    step: TracedStep,
    program: CondensedProgram,
    plans: list[HandPlan],
    capacity: int,
    depth: SearchDepth = "trace",
) -> tuple[HandPlan | None, PlanCost | None]:
    """The fastest hand plan that fits."""
    found = [(cost_by_hand(step, program, one, capacity, depth), one) for one in plans]
    fitting = [(cost, one) for cost, one in found if cost.fits]
    if not fitting:
        return None, None
    cost, one = min(fitting, key=lambda pair: pair[0].seconds)
    return one, cost


def measure(family: Family, where: str, depth: SearchDepth = "trace") -> dict[str, Any]:
    """One row."""
    meshes = meshes_for(where)
    step = traced_jax_step(family.step, family.args, {}, meshes[0], name=family.name)
    start = time.monotonic()
    try:
        found = search(step, None, where, depth=depth)
    except ValueError as error:
        return {"fits": False, "why": str(error), "seconds": time.monotonic() - start}
    taken = time.monotonic() - start
    program = condensed(step, named_dimensions(step))
    hand = by_hand(step, family, where)
    plan, cost = best_by_hand(step, program, hand, found.cost.capacity, depth)
    return {
        "fits": True,
        "depth": depth,
        "mesh": dict(found.mesh.shape),
        "plan": repr(found.plan),
        "cost": found.cost.seconds,
        "memory": found.cost.memory,
        "capacity": found.cost.capacity,
        "bound": found.cost.seconds / found.least_seconds,
        "hand": None if plan is None else f"{plan.name}, {tuple(plan.mesh.shape.values())}",
        "ratio": None if cost is None else found.cost.seconds / cost.seconds,
        "seconds": taken,
    }


def main() -> None:
    """Run the benchmark and save `benchmarks/results/planning_search.json`."""
    benchmark = Benchmark("planning_search", __doc__, quick=1)
    benchmark.add_workloads(FAMILIES)
    benchmark.add("--kinds", action="store_true", help="by kinds of operations alone")
    benchmark.add("--on", nargs="*", help=f"machines; default: {', '.join(MACHINES)}")
    given = benchmark.parse()
    depth: SearchDepth = "kinds" if given.kinds else "trace"
    rows: dict[str, dict[str, Any]] = {}
    for name in given.workloads:
        for where in given.on or (QUICK if given.quick else MACHINES):
            rows[f"{name}, {where}, {depth}"] = row = measure(FAMILIES[name](), where, depth)
            print(name, where, {k: v for k, v in row.items() if k != "plan"}, flush=True)
    columns = {
        "mesh": "{mesh}", "cost (s)": "{cost:.4g}", "best by hand": "{hand}",
        "over it": "{ratio:.3f}", "search (s)": "{seconds:.1f}",
    }  # fmt: skip
    shown = {name: row for name, row in rows.items() if row["fits"] and row["hand"]}
    benchmark.finish(rows, tables.by_name("found, over by hand", columns, shown), merge=True)


if __name__ == "__main__":
    main()
