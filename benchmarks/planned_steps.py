"""Benchmark: do training steps on this host cost what was planned, and is the found plan the best?

    python -m benchmarks.planned_steps [MLP-torch] [MLP-flax] [Llama-torch] [..] [--quick]

Two models, each in torch and in NNX with the same weights (`benchmarks.models.twins`), train on 8
virtual devices under six plans that people write by hand and under the one that
`iso.planner.search` finds. For each:

- `iso.planner.estimate` predicts the seconds of a step at depth "trace" and "partition", with the
  rates that this host was measured to have at the start; both are compared with measured steps by
  rank (Spearman);
- losses of all plans and both frameworks are compared with those of one device, without any plan;
- the collectives of the program that ran, by kind, axes and bytes, with those of the report.

Steps run in turns of four, in random order, and the first of a turn does not count. What a plan
takes is the lower quartile of its steps. One plan is trained twice: how far its two times are apart
is the noise. Each workload may be a run of its own; results of the others are kept.

No constant is fitted. The sizes of the Llama were taken by predictions alone, before any of them
was measured: of eight, those at which the six plans are told farthest apart (depth "trace", torch).
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
import torch
from jax.sharding import Mesh

import isoshard as iso
import isoshard.torch_bridge as xs
from benchmarks.models.twins import Twins, adopt, chain, llama
from benchmarks.planned_tables import markdown, shown
from benchmarks.planning_ranking import spearman
from isoshard import Plan
from isoshard.core.planner.machine.measured_cpu import host_rates
from isoshard.core.planner.programs.device_ops import axes_along
from isoshard.core.runtime.hlo_collectives import collectives as collectives_of
from isoshard.jax_bridge import train_step
from tools.harness import results, timing
from tools.harness.command import Benchmark

DEVICES, RATE, STEPS, TURN = 8, 1e-4, 5, 3
AGAIN = "tensor"
"""The plan that is trained twice."""

MODELS: dict[str, tuple[Callable[..., Twins], dict[str, int], dict[str, int]]] = {
    "MLP": (
        chain,
        {"layers": 4, "width": 1024, "inner": 1024, "batch": 256},
        {"layers": 2, "width": 64, "inner": 128, "batch": 32},
    ),
    "Llama": (
        llama,
        {
            "layers": 6, "width": 256, "inner": 512, "heads": 8, "kv_heads": 8,
            "vocabulary": 2048, "batch": 8, "length": 16,
        },
        {
            "layers": 1, "width": 128, "inner": 128, "heads": 8, "kv_heads": 8,
            "vocabulary": 256, "batch": 16, "length": 16,
        },
    ),
}  # fmt: skip
"""How each is made, its sizes, and those of `--quick`."""

FRAMEWORKS = ("torch", "flax")
DEPTHS = ("trace", "partition")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A plan and its mesh.

    Attributes:
        mesh: over devices that are here.
        plan: it.
    """

    mesh: Mesh
    plan: Plan


def hand_layouts(name: str) -> dict[str, Layout]:
    """The plans that people write by hand, with the batch kept split between layers.

    Args:
        name: of the model.
    """
    line = iso.make_mesh((DEVICES,), ("data",))
    grid = iso.make_mesh((2, DEVICES // 2), ("data", "model"))
    whole, tensor = Plan({"*": None}), Plan.tensor_parallel("model")
    both = Plan.fsdp("data", min_bytes=0) * tensor
    found = {
        "data": Layout(line, _over(whole, ("data",))),
        "FSDP": Layout(line, _over(Plan.fsdp("data", min_bytes=0), ("data",))),
        "tensor": Layout(grid, _over(tensor.otherwise(whole), ("data",))),
        "FSDP x tensor": Layout(grid, _over(both, ("data",))),
        "tensor over all": Layout(
            iso.make_mesh((DEVICES,), ("model",)), _over(tensor.otherwise(whole), None)
        ),
    }
    if name == "Llama":
        axes = ("data", "model")
        found["sequence"] = Layout(grid, _over(Plan.fsdp(axes, min_bytes=0), axes))
    else:
        wide = iso.make_mesh((DEVICES // 2, 2), ("data", "model"))
        found["tensor, 4 x 2"] = Layout(wide, found["tensor"].plan)
    return found


def _over(plan: Plan, spec: tuple[str, ...] | None) -> Plan:
    """The same with a spec for the batch and for what layers pass on."""
    between = dict.fromkeys(("*embed_tokens", "*layers.[0-9]"), spec)
    more = Plan({}, default=None, inputs=spec, activations=between if spec else {})
    if plan.product:
        return more * plan
    return dataclasses.replace(plan, inputs=more.inputs, activations=more.activations)


class Training:
    """A model that trains under a layout.

    Attributes:
        step: makes one step on one of `STEPS` batches, by its number, and gives the loss.
        program: gives the text of the program that ran.
    """

    def __init__(self, twins: Twins, framework: str, layout: Layout):
        """Make it, with weights of seed 0."""
        made = _torch_training if framework == "torch" else _flax_training
        self.step, self.program = made(twins, layout)

    def collectives(self, mesh: Mesh) -> collections.Counter[tuple[Any, ...]]:
        """Those of the program that ran: kind, axes, bytes -> how often.

        Args:
            mesh: that it ran on.
        """
        found = collections.Counter[tuple[Any, ...]]()
        for one in collectives_of(self.program()):
            kind = one.kind.replace("_", "-")
            if axes := axes_along(kind, one.bytes, one.groups, mesh):
                found[kind, axes, one.bytes] += one.times
        return found


def _torch_step(twins: Twins, model: torch.nn.Module) -> Callable[[Any], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = twins.torch_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _torch_training(
    twins: Twins, layout: Layout
) -> tuple[Callable[..., float], Callable[..., str]]:
    mesh, plan = layout.mesh, layout.plan
    model = iso.shard(twins.torch(), mesh, plan)
    if any(part.activations for part in plan.factors):
        xs.constrain_activations(model, mesh, plan)
    step = xs.compile(_torch_step(twins, model))

    given = {str(one): torch.from_numpy(twins.batch(one)) for one in range(STEPS)}
    batches = iso.shard(given, mesh, plan.for_inputs())

    def run(number: int = 0) -> float:
        return float(step(batches[str(number)]))

    return run, lambda: xs.program_text(step)


def _flax_step(twins: Twins, layout: Layout) -> Any:
    tx = optax.adamw(RATE, weight_decay=0.01)  # as torch has it
    return train_step(twins.flax_loss, tx, layout.mesh, layout.plan)


def _flax_training(twins: Twins, layout: Layout) -> tuple[Callable[..., float], Callable[..., str]]:
    step = _flax_step(twins, layout)
    state = step.start(adopt(twins.flax(), twins.torch()))

    given = {str(one): twins.batch(one) for one in range(STEPS)}
    batches = iso.shard(given, layout.mesh, layout.plan.for_inputs())

    def run(number: int = 0) -> float:
        nonlocal state
        state, loss = step(state, batches[str(number)])
        return float(loss)

    return run, lambda: step.lower(state, batches["0"]).compile().as_text()


def planned(twins: Twins, framework: str, layout: Layout) -> tuple[Any, tuple[Any, ...]]:
    """A step and its arguments as planning takes them: no weights are made.

    Args:
        twins: the model.
        framework: one of `FRAMEWORKS`.
        layout: of a Flax step, its first; planning gives it others.
    """
    batch = twins.batch(0)
    if framework == "flax":
        shape = jax.ShapeDtypeStruct(batch.shape, jax.dtypes.canonicalize_dtype(batch.dtype))
        return _flax_step(twins, layout), (twins.flax, shape)
    with torch.device("meta"):
        model = twins.torch()
    return _torch_step(twins, model), (torch.from_numpy(batch).to("meta"),)


def alone(twins: Twins) -> list[float]:
    """Losses of plain torch on one CPU, in float64: the reference.

    Args:
        twins: the model.
    """
    model = twins.torch().double()
    step = _torch_step(twins, model)
    batches = (torch.from_numpy(twins.batch(number)) for number in range(STEPS))
    return [float(step(b.double() if b.is_floating_point() else b)) for b in batches]


def foretold(report: iso.planner.Report) -> collections.Counter[tuple[Any, ...]]:
    """The collectives of a report: kind, axes, bytes of the result -> how often.

    Args:
        report: of an estimate.
    """
    found = collections.Counter[tuple[Any, ...]]()
    for one in report.collectives:
        # A report has the bytes of a reduce-scatter's operand.
        size = one.bytes
        if one.kind == "reduce-scatter":
            size //= int(np.prod([report.mesh[axis] for axis in one.axes]))
        found[one.kind, one.axes, size] += one.count
    return found


def trained(
    twins: Twins, framework: str, layout: Layout, reference: list[float]
) -> tuple[dict[str, Any], Training]:
    """Predict a step under a plan, and train with it.

    Args:
        twins: the model.
        framework: one of `FRAMEWORKS`.
        layout: the plan.
        reference: losses of `alone`.

    Returns:
        Predicted milliseconds, losses, and collectives of the program that ran against those of the
        report; and what trains on.
    """
    step, args = planned(twins, framework, layout)
    row: dict[str, Any] = {"mesh": dict(layout.mesh.shape)}
    how: Any = {"repeats": False, "progress": False}
    for depth in DEPTHS:
        report = iso.planner.estimate(step, args, layout.mesh, layout.plan, depth=depth, **how)
        row[f"{depth}_ms"] = report.time.serial * 1e3
    training = Training(twins, framework, layout)
    row["losses"] = [training.step(number) for number in range(STEPS)]
    row["apart"] = apart(row["losses"], reference)
    ran, said = training.collectives(layout.mesh), foretold(report)
    row["collectives"] = sum(ran.values())
    row["sent_mib"] = sum(one[2] * count for one, count in ran.items()) / 2**20
    row["ran only"] = _listed(ran - said)
    row["said only"] = _listed(said - ran)
    row["differ"] = sum(((ran - said) + (said - ran)).values())
    return row, training


def found_layout(twins: Twins, framework: str) -> tuple[Layout, list[str]]:
    """The plan that the search finds, and what it says of it.

    Args:
        twins: the model.
        framework: one of `FRAMEWORKS`.
    """
    step, args = planned(twins, framework, next(iter(hand_layouts(twins.name).values())))
    found = iso.planner.search(step, args, DEVICES)
    return Layout(found.mesh, found.plan), str(found).splitlines()


def measure(twins: Twins, framework: str, *, rounds: int) -> dict[str, Any]:
    """Predict, train and time one model of one framework under all plans.

    Args:
        twins: the model.
        framework: one of `FRAMEWORKS`.
        rounds: timed turns of each, in which `TURN` steps count.
    """
    layouts = hand_layouts(twins.name)
    layouts["found"], told = found_layout(twins, framework)
    reference = alone(twins)
    rows, runs = dict[str, Any](), dict[str, Callable[[], float]]()
    for name, layout in layouts.items():
        rows[name], training = trained(twins, framework, layout, reference)
        runs[name] = training.step
    runs["again"] = again = Training(twins, framework, layouts[AGAIN]).step
    for number in range(STEPS):
        again(number)
    print(f"timing {twins.name}-{framework}", flush=True)
    times = timing.turns(runs, rounds=rounds, calls=TURN)
    for name, row in rows.items():
        row["step_ms"] = timing.quartile(times[name]) * 1e3
        row["median_ms"] = statistics.median(times[name]) * 1e3
        row["best_ms"] = min(times[name]) * 1e3
    hand = [row for name, row in rows.items() if name != "found"]
    rank = {
        depth: spearman([row[f"{depth}_ms"] for row in hand], [row["step_ms"] for row in hand])
        for depth in DEPTHS
    }
    best = min(set(rows) - {"found"}, key=lambda name: rows[name]["step_ms"])
    return {
        "plan": told,
        "reference": reference,
        "rows": rows,
        "spearman": rank,
        "best by hand": best,
        "found / best by hand": rows["found"]["step_ms"] / rows[best]["step_ms"],
        "again": timing.quartile(times["again"]) * 1e3 / rows[AGAIN]["step_ms"],
        "rates": {
            name: dict(rate) if isinstance(rate, Mapping) else rate
            for name, rate in vars(host_rates()).items()
        },
    }


def _listed(some: collections.Counter[tuple[Any, ...]]) -> list[str]:
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
        "planned_steps", __doc__, rounds=25, quick=2, docs=("planning.md", markdown)
    )
    benchmark.add_workloads([f"{name}-{one}" for name in MODELS for one in FRAMEWORKS])
    given = benchmark.parse()
    print(f"rates {host_rates()}", flush=True)
    found, lines = dict[str, Any](), list[Any]()
    for workload in given.workloads:
        name, _, framework = workload.partition("-")
        made, sizes, small = MODELS[name]
        sizes = small if given.quick else sizes
        facts = measure(made(**sizes), framework, rounds=given.rounds)
        found[workload] = {"sizes": sizes, **facts, "measured": results.circumstances()}
        lines += shown(workload, facts)
    benchmark.finish(found, *lines, merge=True)


if __name__ == "__main__":
    main()
