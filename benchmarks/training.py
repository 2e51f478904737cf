"""Benchmark: a training step of a torch model on a mesh, against the same step written in JAX.

    python -m benchmarks.training [mlp] [gpt2] [resnet50] [vit] [--quick] [--accelerator]

isoshard and hand-written JAX run in one process, in turns; torch on the CPU follows, then each peer
in a process of its own; "compiled to it" and "lazy to it" are our times over a peer's (torch_xla's:
at most 0.65). Beside the times it compares what cannot depend on the machine: losses, programs
compiled, collectives and memory. Losses that differ end the run before anything is timed.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import torch
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import isoshard as iso
from benchmarks import collectives, contestants, timing
from benchmarks.by_hand.step import make_mesh
from benchmarks.contestants import Contestant
from benchmarks.models import sizes
from benchmarks.models.problem import MESH, Problem
from benchmarks.peers import launch

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
    options = _options()
    scale = "gpu" if options.accelerator else "quick" if options.quick else "cpu"
    mesh = _mesh(scale)
    console = Console(width=130)
    results: dict[str, Any] = {}
    problems = [sizes.problem(name, scale) for name in options.workloads or sizes.SIZES]
    for problem in problems:
        console.rule(f"[bold]{problem.name}, mesh {tuple(mesh.shape.values())}, {jax.devices()[0]}")
        rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS[problem.name])
        facts = measure(problem, mesh, scale=scale, rounds=rounds)
        results[problem.name] = {"size": problem.described(), "contestants": facts}
        console.print(*tables(facts), sep="\n")
    if scale != "gpu" and not options.no_peers:
        peers = launch.training([problem.name for problem in problems], scale, steps=LOGGED)
        for name, found in results.items():
            found["peers"] = {peer: rows.get(name, rows) for peer, rows in peers.items()}
            console.print(peer_table(name, found["peers"], found["contestants"]))
    if not options.quick:
        for found in results.values():
            found["measured"] = timing.circumstances()
        name = "training-gpu" if scale == "gpu" else "training"
        path = timing.save(name, {**timing.saved(name), **results})
        console.print(f"wrote {path}")


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
    for make in _beside(scale):
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
        row["loss_difference"] = max(
            abs(a - b) / abs(b) for a, b in zip(row["losses"], base["losses"], strict=True)
        )
        if not row["loss_difference"] <= tolerance:
            raise RuntimeError(
                f"{problem.name}: the losses of {name!r} are off by {row['loss_difference']:.1e} "
                f"from hand-written JAX, more than {tolerance:.0e}: {row['losses']} against "
                f"{base['losses']}"
            )


def _beside(scale: str) -> tuple[Callable[[Problem, Mesh], Contestant], ...]:
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
    return [speed, talk] if kinds else [speed]


def peer_table(name: str, peers: dict[str, Any], facts: dict[str, Any]) -> Table:
    """Show what the peers did; notes in each one's row its ratio, loss, and our times to its.

    Args:
        name: of the problem.
        peers: by peer, what it measured, or why it did not.
        facts: what `measure` found in this process.
    """
    base = facts["pure JAX"]
    shown = Table(title=f"{name}: peers, each in a process of its own; ratio to pure JAX")
    shown.add_column("")
    ours = {title: f"{title.removeprefix('torch, ')} to it" for title in contestants.OURS}
    for title in ("median", "best", "ratio", *ours.values(), "loss off by"):
        shown.add_column(title, justify="right")
    shown.add_column("")
    for peer, row in peers.items():
        if "median_ms" not in row:
            shown.add_row(peer, *[""] * (4 + len(ours)), row["problem"])
            continue
        row["ratio"] = row["median_ms"] / base["median_ms"]
        row["ours"] = {title: facts[title]["median_ms"] / row["median_ms"] for title in ours}
        row["loss_difference"] = max(
            abs(a - b) / abs(b)
            for a, b in zip(row["losses"], base["losses"][: len(row["losses"])], strict=True)
        )
        shown.add_row(
            peer,
            f"{row['median_ms']:.2f} ms",
            f"{row['best_ms']:.2f} ms",
            f"{row['ratio']:.3f}",
            *(f"{ratio:.3f}" for ratio in row["ours"].values()),
            f"{row['loss_difference']:.1e}",
            row.get("note", ""),
        )
    return shown


def _mesh(scale: str) -> Mesh:
    if scale == "gpu":
        if jax.devices()[0].platform == "cpu":
            raise SystemExit("--accelerator, but JAX finds only CPUs; install jax[cuda13]")
        torch.set_float32_matmul_precision("high")  # TF32, as is JAX's default
        return make_mesh((1, 1))
    iso.simulate_devices(math.prod(MESH.values()))
    return make_mesh()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training")
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(sizes.SIZES)}; default: all")
    parser.add_argument("--rounds", type=int, help=f"rounds of {LOGGED} steps of each contestant")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, two rounds, not saved")
    parser.add_argument("--accelerator", action="store_true", help="published sizes on one GPU")
    parser.add_argument("--no-peers", action="store_true", help="leave out DTensor and the others")
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(sizes.SIZES):
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(sizes.SIZES)}")
    return options


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs the GPU as well
    main()
