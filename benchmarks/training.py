"""Benchmark: a training step of a torch model on a mesh, against the same step written in JAX.

    python -m benchmarks.training [mlp] [gpt2] [resnet50] [vit] [--quick] [--accelerator]

isoshard and hand-written JAX run in one process, in turns; torch on the CPU follows, then each peer
in a process of its own; "compiled to it" and "lazy to it" are our times over a peer's (torch_xla's:
at most 0.65). Beside the times it compares what cannot depend on the machine: losses, programs
compiled, collectives and memory. Losses that differ end the run before anything is timed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import jax
import torch
from jax.sharding import Mesh
from rich.table import Table

import isoshard as iso
from benchmarks import collectives, contestants
from benchmarks.by_hand.step import make_mesh
from benchmarks.contestant import Contestant, peak_bytes
from benchmarks.models import sizes
from benchmarks.models.problem import MESH, Problem
from benchmarks.peers import launch
from tools.harness import results, tables, timing
from tools.harness.command import Benchmark

ROUNDS = {"mlp": 40, "gpt2": 8, "resnet50": 6, "vit": 8}  # the shorter the step, the noisier
QUICK_ROUNDS = 2
LOGGED = 5  # a round is so many steps, after which the loss is read, as a training loop logs it
CURVE = 8  # steps of which losses are compared
SETTLED = 2  # steps that may compile
TOLERANCE = {"quick": 1e-4, "cpu": 1e-4, "gpu": 1e-2}  # relative; GPUs multiply in TF32


def main() -> None:
    """Run the benchmark and save `benchmarks/results/training.json` (or `training-gpu.json`).

    Workloads that are not named keep the figures of the run before.
    """
    benchmark = Benchmark("training", __doc__, rounds=0, quick=QUICK_ROUNDS)
    benchmark.add_workloads(sizes.SIZES)
    benchmark.add("--accelerator", action="store_true", help="published sizes on one GPU")
    benchmark.add("--no-peers", action="store_true", help="leave out DTensor and the others")
    options = benchmark.parse()
    scale = "gpu" if options.accelerator else "quick" if options.quick else "cpu"
    benchmark.name = "training-gpu" if scale == "gpu" else "training"
    mesh = _mesh(scale)
    rows: dict[str, Any] = {}
    problems = [sizes.problem(name, scale) for name in options.workloads]
    for problem in problems:
        rounds = options.rounds or ROUNDS[problem.name]
        facts = measure(problem, mesh, scale=scale, rounds=rounds)
        rows[problem.name] = {"size": problem.described(), "contestants": facts}
        where = f"{problem.name}, mesh {tuple(mesh.shape.values())}, {jax.devices()[0]}"
        tables.show(where, *shown(facts))
    if scale != "gpu" and not options.no_peers:
        peers = launch.training(options.workloads, scale, steps=LOGGED)
        for name, row in rows.items():
            row["peers"] = {peer: rows[name] for peer, rows in peers.items()}
            tables.show(peer_table(name, row["peers"], row["contestants"]))
    for row in rows.values():
        row["measured"] = results.circumstances()
    benchmark.finish(rows, merge=True)


def measure(problem: Problem, mesh: Mesh, *, scale: str, rounds: int) -> dict[str, Any]:
    """Compare all contestants of this process on one problem.

    Args:
        problem: what to train.
        mesh: where.
        scale: one of `sizes.SCALES`.
        rounds: timed rounds of each.

    Returns:
        Numbers by contestant: losses, programs compiled, times, collectives and memory.

    Raises:
        RuntimeError: losses differ from those of the hand-written step.
    """
    entered = [make(problem, mesh) for make in contestants.ON_MESH]
    facts = {contestant.name: _prepare(contestant) for contestant in entered}
    agree(problem, facts, TOLERANCE[scale])
    times = timing.interleave({c.name: c.steps(LOGGED) for c in entered}, rounds=rounds)
    # Last, and not in turns: torch's threads keep spinning for a while and slow down the others.
    for make in _peers(scale):
        other = make(problem, mesh)
        facts[other.name] = _prepare(other)
        agree(problem, facts, TOLERANCE[scale])
        times |= timing.interleave({other.name: other.steps(LOGGED)}, rounds=rounds)
    times = {name: [taken / LOGGED for taken in rows] for name, rows in times.items()}
    for name, row in timing.summary(times, entered[0].name).items():
        facts[name] |= row
    base = facts[entered[0].name]
    for row in facts.values():
        if "peak_bytes" in row:
            row["memory_ratio"] = row["peak_bytes"] / base["peak_bytes"]
    return facts


def agree(problem: Problem, facts: dict[str, Any], tolerance: float) -> None:
    """Note how far each contestant's losses are from the first one's.

    Raises:
        RuntimeError: further than `tolerance`, relative.
    """
    base, *_ = facts.values()
    for name, row in facts.items():
        row["loss_difference"] = loss_difference(row, base)
        if not row["loss_difference"] <= tolerance:
            raise RuntimeError(
                f"{problem.name}: the losses of {name!r} are off by {row['loss_difference']:.1e} "
                f"from hand-written JAX, more than {tolerance:.0e}: {row['losses']} against "
                f"{base['losses']}"
            )


def _peers(scale: str) -> tuple[Callable[[Problem, Mesh], Contestant], ...]:
    if scale != "gpu":
        return (contestants.cpu_torch,)
    if not torch.cuda.is_available():
        return ()
    return (contestants.cuda_torch, contestants.cuda_inductor)


def _prepare(contestant: Contestant) -> dict[str, Any]:
    """Train the steps whose losses are compared, watching what is compiled."""
    iso.metrics.reset()
    losses = contestant.curve(0, SETTLED)
    early = len(iso.metrics.compilations())
    losses += contestant.curve(SETTLED, CURVE)
    facts: dict[str, Any] = {"losses": losses}
    if contestant.name in contestants.OURS:
        facts["programs"] = len(iso.metrics.compilations())
        facts["programs_after_step_2"] = facts["programs"] - early
    if contestant.program:
        facts["collectives"] = collectives.summarize(contestant.program())
    if contestant.memory:
        facts["peak_bytes"] = peak_bytes(contestant.memory())
    return facts


def shown(facts: dict[str, Any]) -> list[Table]:
    """Show what `measure` found: times and memory, then collectives."""
    columns = {
        **tables.TIMES,
        "memory": "{memory_ratio:.2f}",
        "programs": "{programs}",
        "loss off by": "{loss_difference:.1e}",
    }
    speed = tables.by_name("a training step; ratio and memory to pure JAX", columns, facts)
    kinds = sorted({kind for row in facts.values() for kind in row.get("collectives", ())})
    rows = {
        name: {kind: row["collectives"].get(kind, (0, 0)) for kind in kinds}
        for name, row in facts.items()
        if "collectives" in row
    }
    columns = {kind: f"{{{kind}[0]}}, {{{kind}[1]:,}}" for kind in kinds}
    talk = tables.by_name("collectives: count and bytes on one device", columns, rows)
    return [speed, talk] if kinds else [speed]


def peer_table(name: str, peers: dict[str, Any], facts: dict[str, Any]) -> Table:
    """Show what the peers did; notes in each one's row its ratio, loss, and our times to its.

    Args:
        name: of the problem.
        peers: by peer, what it measured, or why it did not.
        facts: what `measure` found in this process.
    """
    base = facts["pure JAX"]
    ours = {title: f"{title.removeprefix('torch, ')} to it" for title in contestants.OURS}
    for row in peers.values():
        if "median_ms" not in row:
            continue
        row["ratio"] = row["median_ms"] / base["median_ms"]
        row["ours"] = {title: facts[title]["median_ms"] / row["median_ms"] for title in ours}
        row["loss_difference"] = loss_difference(row, base)
    columns = {
        **tables.TIMES,
        **{label: f"{{ours[{title}]:.3f}}" for title, label in ours.items()},
        "loss off by": "{loss_difference:.1e}",
        "": "{said}",
    }
    rows = {
        peer: {**row, "said": row.get("problem", row.get("note", ""))}
        for peer, row in peers.items()
    }
    title = f"{name}: peers, each in a process of its own; ratio to pure JAX"
    return tables.by_name(title, columns, rows)


def loss_difference(row: dict[str, Any], base: dict[str, Any]) -> float:
    """How far losses are from the first ones of the baseline, relative."""
    first = base["losses"][: len(row["losses"])]
    return max(abs(a - b) / abs(b) for a, b in zip(row["losses"], first, strict=True))


def _mesh(scale: str) -> Mesh:
    if scale == "gpu":
        if jax.devices()[0].platform == "cpu":
            raise SystemExit("--accelerator, but JAX finds only CPUs; install jax[cuda13]")
        torch.set_float32_matmul_precision("high")  # TF32, as is JAX's default
        return make_mesh((1, 1))
    iso.simulate_devices(math.prod(MESH.values()))
    return make_mesh()


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs the GPU as well
    main()
