"""Benchmark: what the three depths of `iso.planner.estimate` say, against the compiler.

    python -m benchmarks.planning_depths [--target v5e] [--quick]

For each (model, plan, mesh): peak memory at "trace" and "partition" over that at "compile", which
is the compiler's own statistics; and the collectives of each depth by kind and axes. Targets that
are not CPUs need their compiler: `isoshard doctor` says whether it is here, or set
ISOSHARD_COMPILER_PYTHON to an interpreter that has it.
"""

from __future__ import annotations

import collections
import time
from typing import Any, NamedTuple

from benchmarks.planning_models import dlrm, gpt2, llama, mixtral, mlp, unet, vit
from isoshard.core.planner.estimating import DEPTHS, device_program
from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.plan_search.hand_plans import hand_plans
from isoshard.core.planner.traced.jax_steps import traced_jax_step
from isoshard.core.planner.traced.traced_step import TracedStep
from tools.harness import tables
from tools.harness.command import Benchmark


class Case(NamedTuple):
    """One model under one hand plan on one machine.

    Attributes:
        model: makes the family.
        plan: name of the hand plan.
        machine: text of the topology.
        shape: of the mesh ("data", "model"), or ("data",).
    """

    model: Any
    plan: str
    machine: str
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.model().name}, {self.plan}, {self.machine}"


def _mlp() -> Any:
    return mlp(layers=6, width=2048, batch=2048)


def _gpt2() -> Any:
    return gpt2(layers=4, width=768, heads=12, batch=32, length=512)


def _llama() -> Any:
    return llama(
        layers=4, width=2048, inner=5632, heads=16, kv_heads=8, vocabulary=32000, batch=32,
        length=1024,
    )  # fmt: skip


def _mixtral() -> Any:
    return mixtral(
        layers=2, width=1024, inner=3584, heads=16, kv_heads=8, experts=8, batch=32, length=1024
    )


def _vit() -> Any:
    return vit(layers=6, width=768, heads=12, batch=256)


def _unet() -> Any:
    return unet(widths=(64, 128, 256), image=64, batch=32)


def _dlrm() -> Any:
    return dlrm()


CASES = (
    Case(_mlp, "data", "cpu:8", (8,)),
    Case(_gpt2, "FSDP", "cpu:8", (8,)),
    Case(_llama, "tensor", "cpu:8", (2, 4)),
    Case(_vit, "FSDP x tensor", "cpu:8", (2, 4)),
    Case(_mlp, "FSDP", "v5e:4x4", (16,)),
    Case(_gpt2, "data", "v5e:4x4", (16,)),
    Case(_llama, "FSDP x tensor", "v5e:4x4", (4, 4)),
    Case(_vit, "tensor", "v5e:4x4", (4, 4)),
    Case(_gpt2, "FSDP", "h100:2x8", (16,)),
    Case(_llama, "FSDP x tensor", "h100:2x8", (2, 8)),
    Case(_mixtral, "expert", "h100:2x8", (2, 8)),
    Case(_unet, "FSDP", "h100:2x8", (16,)),
)
QUICK = 2


def laid_out(case: Case) -> TracedStep:
    """The step of a case with the layouts of its plan."""
    names = ("data", "model")[: len(case.shape)]
    mesh = topology(case.machine).mesh(case.shape, names)
    family = case.model()
    step = traced_jax_step(family.step, family.args, {}, mesh, None, name=family.name)
    plans = {one.name: one for one in hand_plans(step, [mesh])}
    return step.laid_out(plans[case.plan].layouts)


def totals(program: Any) -> dict[str, list[int]]:
    """Collectives by kind and axes: how many, and bytes of all results together."""
    found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for op in program.ops:
        if op.is_collective:
            sums = found[f"{op.name} {'+'.join(op.axes)}"]
            sums[0] += op.times
            sums[1] += op.times * op.sent
    return dict(sorted(found.items()))


def measure(case: Case, depths: tuple[str, ...] = DEPTHS) -> dict[str, Any]:
    """One row."""
    step = laid_out(case)
    row: dict[str, Any] = {}
    for depth in depths:
        started = time.monotonic()
        program = device_program(step, depth, progress=False, timeout=600)  # type: ignore[arg-type]
        row[depth] = {
            "peak": program.memory.peak,
            "collectives": totals(program),
            "without_line": sum(1 for op in program.ops if op.is_collective and not op.line),
            "seconds": time.monotonic() - started,
        }
    for depth in ("trace", "partition"):
        if depth in row and "compile" in row:
            row[f"{depth}_over_compile"] = row[depth]["peak"] / row["compile"]["peak"]
    return row


def main() -> None:
    """Run the benchmark and save `benchmarks/results/planning_depths.json`."""
    benchmark = Benchmark("planning_depths", __doc__, quick=1)
    benchmark.add("--target", action="append", help="only machines that begin so, such as v5e")
    given = benchmark.parse()
    cases = [one for one in CASES if not given.target or one.machine.split(":")[0] in given.target]
    rows: dict[str, dict[str, Any]] = {}
    for case in cases[: QUICK if given.quick else None]:
        rows[case.name] = row = measure(case)
        shown = {key: value for key, value in row.items() if isinstance(value, float)}
        print(case.name, shown, {d: row[d]["collectives"] for d in DEPTHS}, flush=True)
    columns = {
        "trace / compile": "{trace_over_compile:.3f}",
        "partition / compile": "{partition_over_compile:.3f}",
    }
    benchmark.finish(rows, tables.by_name("peak memory", columns, rows), merge=True)


if __name__ == "__main__":
    main()
