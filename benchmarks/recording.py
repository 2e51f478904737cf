"""Benchmark: what it costs to record one operation, over a training step of GPT-2.

    python -m benchmarks.recording [--quick] [--rounds N]

The time from the start of a step to just before `sync`, divided by the number of operations that
reached the device: forward, backward, clipping and AdamW, with all that torch itself does in
between. Contestants get different numbers of operations for the same step (an optimizer may update
all parameters in one), so the time is also divided by what torch dispatches on the CPU; and, in
steps of their own, each operation is timed, for the median over the operations of a step.

The model has GPT-2's layers at tiny width, since recording does not look at elements. A chain of
500 additions is timed beside it, for peers that cannot run the step.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

import isoshard.torch_bridge as xs
from benchmarks import floor, phases
from benchmarks.models import gpt2
from benchmarks.models.problem import Problem
from benchmarks.peers import launch
from benchmarks.phases import PHASES, Stepper
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from tools.harness import tables
from tools.harness.command import Benchmark


def main() -> None:
    """Run the benchmark and save `benchmarks/results/recording.json`."""
    benchmark = Benchmark(
        "recording", __doc__, rounds=40, quick=30, docs=("benchmarks.md", markdown)
    )
    benchmark.add("--no-peers", action="store_true", help="leave out torchax and torch_xla")
    options = benchmark.parse()
    results = measure(gpt2.problem(phases.QUICK if options.quick else phases.FULL), options.rounds)
    if not (options.quick or options.no_peers):
        for name, peer in launch.RECORDING.items():
            row = results[name] = launch.run(peer, options.rounds)
            if "step_ms" in row:
                row["us_per_cpu_op"] = row["step_ms"] * 1e3 / results["torch CPU"]["ops"]
        _to_floor(results)
    benchmark.finish(results, table(results))


def measure(problem: Problem, rounds: int) -> dict[str, Any]:
    """Time the recording of a step by the engine, by the floor, and by torch on the CPU.

    Args:
        problem: what to train.
        rounds: timed steps of each.

    Returns:
        By contestant: operations, microseconds per operation, in all and by phase, and the ratio
        to the floor.
    """
    torch.set_num_threads(1)
    engine = Stepper(problem, lambda thing: thing.to("jax"))
    for _ in range(phases.SETTLE):
        engine.step()
        engine.drop()
        xs.sync(wait=True)
    streams = [floor.Stream.of(phase) for phase in engine.phases()]
    engine.drop()
    entries = _entries()
    xs.sync(wait=True)
    combined = floor.Stream(item for stream in streams for item in stream.items)
    lowest = Stepper(problem, floor.place, state_of=engine.optimizer)
    cpu = Stepper(problem, lambda thing: thing)
    for _ in range(phases.SETTLE):
        cpu.step()
    cpu_counts = cpu.counts()
    steps: dict[str, list[tuple[float, ...]]] = {"isoshard": [], "floor": [], "torch CPU": []}
    medians: dict[str, list[float]] = {"isoshard": [], "floor": []}
    chains: dict[str, list[float]] = {name: [] for name in steps}
    chained = _chains()
    for _ in range(rounds):
        gc.collect()
        steps["isoshard"].append(engine.step())
        engine.drop()
        xs.sync(wait=True)
        medians["isoshard"].append(_median(lazy_tensor.LazyTensor, engine.step))
        engine.drop()
        xs.sync(wait=True)
        with floor.replaying(combined):
            steps["floor"].append(lowest.step())
        lowest.drop()
        with floor.replaying(combined):
            medians["floor"].append(_median(floor.Floor, lowest.step))
        lowest.drop()
        tapes.replace(tapes.Tape())  # the floor's factories were recorded on it
        steps["torch CPU"].append(cpu.step())
        for name, chain in chained.items():
            chains[name].append(chain())
            xs.sync(wait=True)
    counts = [len(stream.items) for stream in streams]
    results = {
        name: phases.summary(steps[name], cpu_counts if name == "torch CPU" else counts, times)
        for name, times in chains.items()
    }
    for row in results.values():
        row["us_per_cpu_op"] = row["step_ms"] * 1e3 / sum(cpu_counts)
    for name, median in medians.items():
        results[name]["median_us_per_op"] = statistics.median(median) * 1e6
    _to_floor(results)
    results["isoshard"]["entries"] = entries
    return results


def _median(kind: type[torch.Tensor], step: Callable[[], Any]) -> float:
    """Seconds of the median operation of one step."""
    return statistics.median(phases.intervals(kind, step))


def _chains() -> dict[str, Callable[[], float]]:
    x = torch.ones(8, 8)
    on_device = x.to("jax")
    bare = floor.place(x)
    stream = floor.Stream.of(lambda: phases.chain(on_device, on_device))
    xs.sync(wait=True)

    def lowest() -> float:
        with floor.replaying(stream):
            return phases.chain(bare, bare)

    return {
        "isoshard": lambda: phases.chain(on_device, on_device),
        "floor": lowest,
        "torch CPU": lambda: phases.chain(x, x),
    }


def _entries() -> int:
    """Operations on this thread's tape."""
    recorder = tapes.recorder()
    assert isinstance(recorder, tapes.Tape)
    return sum(isinstance(entry[0], int) for entry in recorder.program)


def _to_floor(results: dict[str, Any]) -> None:
    """Note each contestant's ratios to the floor."""
    lowest = results["floor"]
    for row in results.values():
        for key in ("us_per_op", "median_us_per_op", "chain_us_per_op"):
            if key in row:
                row[f"{key}_to_floor"] = row[key] / lowest[key]


def table(results: dict[str, Any]) -> Table:
    """Show what `measure` found, and the peers."""
    columns = {
        "ops": "{ops}",
        "step": "{step_ms:.2f} ms",
        "median": "{median_us_per_op:.2f}",
        "median to floor": "{median_us_per_op_to_floor:.2f}",
        "mean": "{us_per_op:.2f}",
        "mean to floor": "{us_per_op_to_floor:.2f}",
        "us/CPU op": "{us_per_cpu_op:.2f}",
        **{phase: f"{{phases[{phase}][us_per_op]:.2f}}" for phase in PHASES},
        "chain": "{chain_us_per_op:.2f}",
        "chain to floor": "{chain_us_per_op_to_floor:.2f}",
        "": "{problem}",
    }
    title = "recording a training step of GPT-2: us per operation"
    shown = tables.by_name(title, columns, results)
    entries = results["isoshard"]["entries"]
    shown.caption = f"{results['isoshard']['ops']} operations became {entries} entries of the tape"
    return shown


markdown = tables.documented(table)


if __name__ == "__main__":
    main()
