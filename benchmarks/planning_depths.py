"""Benchmark: what the three depths of `iso.planner.estimate` say, against the compiler.

    python -m benchmarks.planning_depths [--target v5e] [--quick]

For each (model, plan, mesh): peak memory at "trace" and "partition" over that at "compile", which
is the compiler's own statistics; and the collectives of each depth by kind and axes. Targets that
are not CPUs need their compiler: `isoshard doctor` says whether it is here, or set
ISOSHARD_COMPILER_PYTHON to an interpreter that has it.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.counted_collectives import Sent, counted
from benchmarks.hand_plans import hand_plans
from benchmarks.planning_models import FAMILIES, Family
from isoshard.core.traced.jax_steps import traced_jax_step
from isoshard.core.traced.traced_step import TracedStep
from isoshard.planner.estimating import DEPTHS, device_program
from isoshard.planner.machine.topologies import topology
from isoshard.planner.plan_search.constrained_step import constrained
from isoshard.planner.programs.compile_worker import compiled
from isoshard.planner.programs.compiling import PLATFORMS
from isoshard.planner.programs.exporting import exported
from isoshard.planner.programs.targets import CompileTarget, target_of
from isoshard.planner.propagation.boundary_shardings import for_compilers
from tools.harness import tables
from tools.harness.command import Benchmark


class Case(NamedTuple):
    """One model under one hand plan on one machine.

    Attributes:
        model: the family's name.
        plan: name of the hand plan.
        machine: text of the topology.
        shape: of the mesh ("data", "model"), or ("data",).
    """

    model: str
    plan: str
    machine: str
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.model}, {self.plan}, {self.machine}"

    @property
    def family(self) -> Family:
        """The model at its size for that machine."""
        return FAMILIES[self.model](**SIZES[self.machine.split(":")[0]][self.model])


SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "MLP": {"layers": 6, "width": 2048, "batch": 2048},
        "GPT-2": {"layers": 4, "batch": 8, "length": 512},
        "Llama": {
            "layers": 4, "width": 1024, "inner": 2816, "heads": 16, "kv_heads": 8,
            "vocabulary": 32000, "batch": 8, "length": 256,
        },
        "ViT": {"layers": 6, "width": 768, "heads": 12, "batch": 16},
    },
    "v5e": {
        "MLP": {"batch": 262144},
        "GPT-2": {"batch": 64},
        "Llama": {"layers": 16, "batch": 8},
        "ViT": {"batch": 1024},
    },
    "h100": {
        "GPT-2": {"batch": 512},
        "Llama": {"batch": 32},
        "Mixtral": {"layers": 8, "batch": 8},
        "U-Net": {"batch": 4096},
        "DLRM": {"batch": 16777216},
    },
}  # fmt: skip
"""What a family differs in from its published size (the defaults of `planning_models`), by machine.

The rule, fixed before any of these was compiled: of a TPU or GPU the published widths; the
published layers, halved until parameters and optimizer take at most a quarter of a device under the
case's plan; the largest power of two as batch at which depth "trace" of that day said that at most
half of a device is used. Of "cpu", what 8 virtual devices on two cores run in about a minute.
"""

BLOCKS = re.compile(
    r"(layers|h|blocks)\.\d+|embed_tokens|wte|patch_embed\.proj|(down|up)\.\d+\.\w+|out"
)
"""Modules whose outputs every plan keeps split over the batch, as a plan's activations say it:
embeddings, whole layers, convolutions of the U-Net. Without that the partitioner may give up the
batch, which is not what is called FSDP."""

CASES = (
    Case("MLP", "data", "cpu:8", (8,)),
    Case("GPT-2", "FSDP", "cpu:8", (8,)),
    Case("Llama", "tensor", "cpu:8", (2, 4)),
    Case("ViT", "FSDP x tensor", "cpu:8", (2, 4)),
    Case("MLP", "FSDP", "v5e:4x4", (16,)),
    Case("GPT-2", "data", "v5e:4x4", (16,)),
    Case("Llama", "FSDP x tensor", "v5e:4x4", (4, 4)),
    Case("ViT", "tensor", "v5e:4x4", (4, 4)),
    Case("GPT-2", "FSDP", "h100:2x8", (16,)),
    Case("Llama", "FSDP x tensor", "h100:2x8", (2, 8)),
    Case("Mixtral", "expert", "h100:2x8", (2, 8)),
    Case("U-Net", "FSDP", "h100:2x8", (16,)),
)
HELD_OUT = (
    Case("GPT-2", "FSDP x tensor", "cpu:8", (2, 4)),
    Case("Llama", "sequence", "v5e:4x4", (4, 4)),
    Case("DLRM", "FSDP", "h100:2x8", (16,)),
)
"""Cases that no rule was made by looking at."""
QUICK = 2
TIMEOUT = 7200.0
"""Seconds that a compiler has."""


_BATCH = {"sequence": ("data", "model")}
"""Of a plan, what splits the batch, and the axis after it."""


def sharded_step(case: Case, mesh: Mesh | None = None) -> TracedStep:
    """The step of a case with the layouts of its plan.

    Args:
        case: it.
        mesh: over devices that are here, in place of described ones.
    """
    if mesh is None:
        mesh = topology(case.machine).mesh(case.shape, ("data", "model")[: len(case.shape)])
    family = case.family
    step = traced_jax_step(family.step, family.args, {}, mesh, None, name=family.name)
    plans = {plan.name: plan for plan in hand_plans(step, [mesh])}
    over_batch = NamedSharding(mesh, PartitionSpec(*_BATCH.get(case.plan, ("data",))))
    names = {name for input_ in step.inputs for name in _prefixes(input_.name)}
    between = {name: over_batch for name in names if BLOCKS.fullmatch(name)}
    program = constrained(step.program, between)
    return dataclasses.replace(step.resharded(plans[case.plan].layouts), program=program)


def _prefixes(name: str) -> list[str]:
    """The modules that a parameter is inside of."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def totals(program: Any) -> dict[str, list[int]]:
    """Collectives by kind and axes: how many, and bytes of all results together."""
    totals_of: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for op in program.ops:
        if op.is_collective:
            sums = totals_of[f"{op.name} {'+'.join(op.axes)}"]
            sums[0] += op.times
            sums[1] += op.times * op.sent
    return dict(sorted(totals_of.items()))


def counts(step: TracedStep, target: CompileTarget, platform: str) -> dict[str, Sent]:
    """The compiled program's collectives, by a reader that shares nothing with the planner.

    Args:
        step: as it is compiled.
        target: what its compiler is told.
        platform: as `jax.export` calls it.
    """
    text = compiled(exported(step, platform), target, progress=False, timeout=TIMEOUT).text
    return counted(text, dict(step.mesh.shape))


def measure(case: Case, depths: tuple[str, ...] = DEPTHS) -> dict[str, Any]:
    """One row."""
    step = sharded_step(case)
    row: dict[str, Any] = {}
    for depth in depths:
        started = time.monotonic()
        program = device_program(
            step,
            depth,  # type: ignore[arg-type]
            repeats=True,
            progress=False,
            timeout=TIMEOUT,
        )
        row[depth] = {
            "peak": program.memory.peak,
            "collectives": totals(program),
            "without_line": sum(1 for op in program.ops if op.is_collective and not op.line),
            "seconds": time.monotonic() - started,
        }
    if "compile" in row:
        machine, looped = topology(case.machine), for_compilers(step)
        platform = PLATFORMS[machine.chip.platform]
        results = counts(looped, target_of(looped.mesh, machine), platform)
        same = {
            name: [collective.operations, collective.bytes] for name, collective in results.items()
        }
        row["compile"]["as_counted"] = same == row["compile"]["collectives"]
        if "partition" in row:
            kinds = ("compile", "partition")
            sent = [{n: b for n, (_, b) in row[kind]["collectives"].items()} for kind in kinds]
            row["partition"]["bytes_as_compiled"] = sent[0] == sent[1]
    for depth in ("trace", "partition"):
        if depth in row and "compile" in row:
            row[f"{depth}_over_compile"] = row[depth]["peak"] / row["compile"]["peak"]
    return row


def memory_table(rows: dict[str, dict[str, Any]], cases: Sequence[Case]) -> str:
    """Peaks at depth "trace" over the compiler's, as docs/planning.md has them."""
    lines = ['| case | peak, compiler (GiB) | "trace" / compiler |', "|---|---|---|"]
    for case in cases:
        row = rows[case.name]
        peak = row["compile"]["peak"] / 2**30
        lines.append(f"| {case.name} | {peak:.2f} | {row['trace_over_compile']:.3f} |")
    return "\n".join(lines)


def partition_table(rows: dict[str, dict[str, Any]], cases: Sequence[Case]) -> str:
    """Peaks and collectives at depth "partition" beside the compiler's, likewise."""
    head = 'case | "partition" / compiler | collectives: kinds, axes, bytes | how many'
    lines = [f"| {head} |", "|---|---|---|---|"]
    for case in cases:
        row = rows[case.name]
        sent = "equal" if row["partition"]["bytes_as_compiled"] else "differ"
        many = _compared_counts(row["partition"]["collectives"], row["compile"]["collectives"])
        ratio = row["partition_over_compile"]
        lines.append(f"| {case.name} | {ratio:.3f} | {sent} | {many} |")
    return "\n".join(lines)


def _compared_counts(results: dict[str, list[int]], compiled_: dict[str, list[int]]) -> str:
    pairs = {
        name: [each.get(name, [0])[0] for each in (results, compiled_)]
        for name in sorted({*results, *compiled_})
    }
    different = [
        f"{name}: {count} for {two}" for name, (count, two) in pairs.items() if count != two
    ]
    return "; ".join(different) or "equal"


def main() -> None:
    """Run the benchmark and save `benchmarks/results/planning_depths.json`."""
    benchmark = Benchmark("planning_depths", __doc__, quick=1)
    benchmark.add("--depth", action="append", help="only these depths")
    benchmark.add("--target", action="append", help="only machines that begin so, such as v5e")
    benchmark.add("--model", action="append", help="only these models")
    options = benchmark.parse()
    cases = [
        case
        for case in (*CASES, *HELD_OUT)
        if not options.target or case.machine.split(":")[0] in options.target
        if not options.model or case.model in options.model
    ]
    rows: dict[str, dict[str, Any]] = {}
    for case in cases[: QUICK if options.quick else None]:
        rows[case.name] = row = measure(case, tuple(options.depth or DEPTHS))
        shown = {key: value for key, value in row.items() if isinstance(value, float)}
        print(
            case.name,
            shown,
            {d: row[d]["collectives"] for d in options.depth or DEPTHS},
            flush=True,
        )
    shown = [d for d in ("trace", "partition") if d in (options.depth or DEPTHS)]
    columns = {f"{depth} / compile": f"{{{depth}_over_compile:.3f}}" for depth in shown}
    benchmark.finish(rows, tables.by_name("peak memory", columns, rows), merge=True)


if __name__ == "__main__":
    main()
