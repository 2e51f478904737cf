"""Benchmark: a training step of a torch model on a mesh, against the same step written in JAX.

    python -m benchmarks.training [mlp] [transformer] [--rounds N]

Everything runs in one process, in turns. Beside the times it compares what cannot depend on the
machine: the losses of 20 steps, the programs compiled, the collectives and the memory.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import isoshard as iso
from benchmarks import collectives, contestants, mlp, timing, transformer
from benchmarks.contestants import Contestant
from benchmarks.workload import Workload, make_mesh

WORKLOADS = {workload.name: workload for workload in (mlp.WORKLOAD, transformer.WORKLOAD)}
MESH = (2, 4)
ROUNDS = {"mlp": 40, "transformer": 8}  # the shorter the step, the noisier
LOGGED = 5  # a round is so many steps, after which the loss is read, as a training loop logs it
CURVE = 20  # steps of which losses are compared
SETTLED = 2  # steps that may compile


def main() -> None:
    """Run the benchmark and save `benchmarks/results/training.json`."""
    options = _options()
    iso.simulate_devices(math.prod(MESH))
    console = Console()
    results = {}
    for name in options.workloads or WORKLOADS:
        console.rule(f"[bold]{name}, mesh {MESH}, {jax.device_count()} virtual devices")
        results[name] = measure(WORKLOADS[name], rounds=options.rounds or ROUNDS[name])
        console.print(*tables(results[name]), sep="\n")
    console.print(f"wrote {timing.save('training', results)}")


def measure(workload: Workload, *, rounds: int) -> dict[str, Any]:
    """Compare all contestants on one workload.

    Args:
        workload: what to train.
        rounds: timed steps of each.

    Returns:
        Numbers by contestant: losses, programs compiled, times, collectives and memory.
    """
    mesh = make_mesh(MESH)
    entered = [make(workload, mesh) for make in contestants.ON_MESH]
    facts = {contestant.name: _prepare(contestant) for contestant in entered}
    times = timing.interleave({c.name: c.steps(LOGGED) for c in entered}, rounds=rounds)
    # Last, and not in turns: torch's threads keep spinning for a while and slow down the others.
    cpu = contestants.cpu_torch(workload, mesh)
    facts[cpu.name] = _prepare(cpu)
    times |= timing.interleave({cpu.name: cpu.steps(LOGGED)}, rounds=rounds)
    times = {name: [taken / LOGGED for taken in rows] for name, rows in times.items()}
    reference = facts[cpu.name]["losses"]
    for name, row in timing.summary(times, entered[0].name).items():
        facts[name] |= row
        facts[name]["loss_difference"] = max(
            abs(a - b) / abs(b) for a, b in zip(facts[name]["losses"], reference, strict=True)
        )
    base = facts[entered[0].name]
    for row in facts.values():
        if "peak_bytes" in row:
            row["memory_ratio"] = row["peak_bytes"] / base["peak_bytes"]
    return facts


def _prepare(contestant: Contestant) -> dict[str, Any]:
    """Train the steps whose losses are compared, watching what is compiled."""
    iso.metrics.reset()
    losses = contestant.curve(SETTLED)
    early = len(iso.metrics.compilations())
    losses += [float(contestant.run(*contestant.load(number))) for number in range(SETTLED, CURVE)]
    facts: dict[str, Any] = {"losses": losses}
    if contestant.name in ("torch, compiled", "torch, lazy"):
        facts["programs"] = len(iso.metrics.compilations())
        facts["programs_after_step_2"] = facts["programs"] - early
    if contestant.program:
        facts["collectives"] = collectives.summarize(contestant.program())
    if contestant.memory:
        facts["peak_bytes"] = peak_bytes(contestant.memory())
    return facts


def peak_bytes(memory: Any) -> int:
    """Bytes that a program needs on one device: its arguments, outputs and temporaries."""
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def tables(facts: dict[str, Any]) -> list[Table]:
    """Show what `measure` found: times and memory, then collectives."""
    speed = Table(title="a training step; ratio and memory to pure JAX")
    speed.add_column("")
    for title in ("median", "best", "ratio", "memory", "programs", "loss off by"):
        speed.add_column(title, justify="right")
    for name, row in facts.items():
        memory = f"{row['memory_ratio']:.2f}" if "memory_ratio" in row else ""
        speed.add_row(
            name,
            f"{row['median_ms']:.2f} ms",
            f"{row['best_ms']:.2f} ms",
            f"{row['ratio']:.3f}",
            memory,
            str(row.get("programs", "")),
            f"{row['loss_difference']:.1e}",
        )
    talk = Table(title="collectives: count and bytes on one device")
    talk.add_column("")
    kinds = sorted({kind for row in facts.values() for kind in row.get("collectives", ())})
    for kind in kinds:
        talk.add_column(kind, justify="right")
    for name, row in facts.items():
        if "collectives" in row:
            found = (row["collectives"].get(kind, (0, 0)) for kind in kinds)
            talk.add_row(name, *(f"{count}, {size:,}" for count, size in found))
    return [speed, talk]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training")
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; all by default")
    parser.add_argument("--rounds", type=int, help=f"rounds of {LOGGED} steps of each contestant")
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    return options


if __name__ == "__main__":
    main()
