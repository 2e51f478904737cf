"""Benchmark: an exported torch model run by `iso.onnx.compile`, against the same model in JAX.

    python -m benchmarks.onnx_run [mlp] [gpt2] [--rounds N] [--quick]

The torch models of `benchmarks.models` are exported over the mesh (data=2, model=4) of eight
virtual devices. The compiled file and the hand-written JAX function, both laid out alike, run in
one process, in turns; ONNX Runtime runs the same file on the CPU without a mesh, after them, as its
threads spin on. Results that differ end the run before anything is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import onnxruntime
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.table import Table

import isoshard as iso
from benchmarks import collectives
from benchmarks.by_hand.models import FORWARDS
from benchmarks.models import sizes
from benchmarks.models.problem import MESH, Problem
from tools.harness import tables, timing
from tools.harness.command import Benchmark

ROUNDS = 60
TOLERANCE = 1e-4  # relative to the largest output
OPSETS = {"opset 20": 20, "opset 23": 23}
BASELINE = "pure JAX"


def main() -> None:
    """Run the benchmark and save `benchmarks/results/onnx.json`."""
    benchmark = Benchmark("onnx", __doc__, rounds=ROUNDS, quick=2, docs=("benchmarks.md", markdown))
    benchmark.add_workloads(FORWARDS)
    options = benchmark.parse()
    iso.simulate_devices(math.prod(MESH.values()))
    mesh = iso.make_mesh(tuple(MESH.values()), tuple(MESH))
    results = {}
    for name in options.workloads:
        problem = sizes.problem(name, "quick" if options.quick else "cpu")
        results[name] = measure(problem, mesh, rounds=options.rounds)
        tables.show(table(name, results[name]))
    benchmark.finish(results, merge=True)


def measure(problem: Problem, mesh: Mesh, *, rounds: int) -> dict[str, Any]:
    """Compare all contestants on one model.

    Args:
        problem: the model, its layout and its batches.
        mesh: where.
        rounds: timed calls of each.

    Returns:
        Times, ratios and collectives by contestant.

    Raises:
        RuntimeError: results differ.
    """
    module = problem.module().eval()
    x = problem.batch(0)[0]
    contestants = {BASELINE: by_hand(problem, module, x, mesh)}
    files = {}
    for title, opset in OPSETS.items():
        files[title] = exported(problem, module, x, mesh, opset)
        contestants[f"isoshard, {title}"] = compiled(files[title], x)
    peers = {"ONNX Runtime": in_onnxruntime(files["opset 20"], x)}
    expected = np.asarray(contestants[BASELINE][0]())
    for title, (run, _) in {**contestants, **peers}.items():
        off = np.abs(np.asarray(run()) - expected).max() / np.abs(expected).max()
        if not off <= TOLERANCE:
            raise RuntimeError(f"{problem.name}: {title} is off by {off:.1e} from {BASELINE}")
    times = timing.interleave({k: run for k, (run, _) in contestants.items()}, rounds=rounds)
    times |= timing.interleave({k: run for k, (run, _) in peers.items()}, rounds=rounds)
    facts = timing.summary(times, BASELINE)
    for title, (_, program) in contestants.items():
        facts[title]["collectives"] = collectives.summarize(program())
    return {"size": problem.described(), "contestants": facts}


Contestant = tuple[Callable[[], Any], Callable[[], str]]


def by_hand(problem: Problem, module: torch.nn.Module, x: np.ndarray, mesh: Mesh) -> Contestant:
    """The forward function written in JAX, jitted."""
    params = {
        name: iso.shard(p.detach().numpy(), mesh, P(*problem.spec(name)), copy=True)
        for name, p in module.named_parameters()
    }
    placed = _placed(x, NamedSharding(mesh, P(*problem.batch_spec)))
    forward = jax.jit(FORWARDS[problem.name](problem))
    program = forward.lower(params, placed).compile()
    return lambda: jax.block_until_ready(forward(params, placed)), program.as_text


def exported(
    problem: Problem, module: torch.nn.Module, x: np.ndarray, mesh: Mesh, opset: int
) -> Any:
    """The torch module as an annotated model, laid out as the hand-written side is."""
    specs = {name: P(*problem.spec(name)) for name, _ in module.named_parameters()}
    plan = iso.Plan(specs, inputs=P(*problem.batch_spec))
    return iso.onnx.export_torch(module, (torch.from_numpy(x),), mesh, plan, opset=opset)


def compiled(model: Any, x: np.ndarray) -> Contestant:
    """The model as a function of JAX."""
    run = iso.onnx.compile(model)
    (sharding,) = run.input_shardings.values()
    placed = _placed(x, sharding)
    return lambda: jax.block_until_ready(run(placed)), lambda: "\n".join(run.hlo(placed))


def in_onnxruntime(model: Any, x: np.ndarray) -> Contestant:
    """The same file, whose annotations ONNX Runtime does not read, on the whole CPU."""
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    feeds = {session.get_inputs()[0].name: x}
    return lambda: session.run(None, feeds)[0], str


def table(name: str, results: dict[str, Any]) -> Table:
    """Show what `measure` found."""

    def talk(row: dict[str, Any]) -> str:
        return ", ".join(f"{n} {kind}" for kind, (n, _) in row.get("collectives", {}).items())

    rows = {title: {**row, "talk": talk(row)} for title, row in results["contestants"].items()}
    columns = {**tables.TIMES, "collectives": "{talk}"}
    return tables.by_name(f"{name}: one forward pass, ratio to {BASELINE}", columns, rows)


def markdown(results: dict[str, Any]) -> str:
    """The table of docs/benchmarks.md.

    Args:
        results: the results.
    """
    return "\n\n".join(tables.in_markdown(table(name, result)) for name, result in results.items())


def _placed(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return iso.shard(x, sharding.mesh, sharding, copy=True)


if __name__ == "__main__":
    main()
