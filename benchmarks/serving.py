"""Benchmark: continuous batching, compared with a loop over slots written by hand in JAX.

    python -m benchmarks.serving [--quick] [--rounds N]

64 requests of mixed lengths for a Llama of `transformers` in 8 slots on the (2, 4) mesh, greedily:
`isoshard.torch_bridge.serving.Engine`, and the same model, cache and loop in JAX
(`benchmarks/by_hand/slots.py`). Both have the same parameters, sharding and buckets, donate their
cache, and read tokens while the next step runs; they serve all requests in turns. A run in which
their tokens differ ends with an error. Processor time counts all threads of the process, so it is
the steadier figure on a busy machine.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch
from rich.table import Table

import isoshard as iso
from benchmarks.by_hand.slots import SlotLoop
from benchmarks.by_hand.step import make_mesh
from benchmarks.models import llama
from tools.harness import tables
from tools.harness.command import Benchmark

SIZES = {"4 layers, width 256": llama.Size(4, 256, 688, 8, 4, 2048, 256)}
QUICK = {"2 layers, width 64": llama.Size(2, 64, 128, 8, 4, 256, 256)}
SLOTS, MAX_LENGTH, BUCKETS = 8, 96, (16, 32, 64)
REQUESTS = 64


def main() -> None:
    """Run the benchmark and save `benchmarks/results/serving.json`."""
    benchmark = Benchmark("serving", __doc__, rounds=5, quick=2, docs=("benchmarks.md", markdown))
    options = benchmark.parse()
    iso.simulate_devices(8)
    sizes = QUICK if options.quick else SIZES
    results = {name: measure(size, rounds=options.rounds) for name, size in sizes.items()}
    benchmark.finish(results, table(results))


def measure(size: llama.Size, *, rounds: int, requests: int = REQUESTS) -> dict[str, Any]:
    """Serve the same requests by both, in turns.

    Args:
        size: of the model.
        rounds: timed runs of each.
        requests: how many.

    Returns:
        Tokens per second of wall and of processor time, their ratios (ours to JAX's, the median
        over the rounds), and the programs that each compiled.

    Raises:
        RuntimeError: their tokens differ.
    """
    work = mixed_requests(requests, size.vocabulary)
    contestants, programs = _contestants(size)
    before = [programs()]
    outputs = {}
    for name, serve in contestants.items():
        outputs[name] = serve(work)
        before.append(programs())
    if outputs["isoshard"] != outputs["jax"]:
        raise RuntimeError("the engine and the loop by hand give different tokens")
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in sorted(contestants, reverse=bool(number % 2)):
            started = time.perf_counter(), time.process_time()
            contestants[name](work)
            ended = time.perf_counter(), time.process_time()
            spent[name].append((ended[0] - started[0], ended[1] - started[1]))
    tokens = sum(new for _, new in work)
    result: dict[str, Any] = {"tokens": tokens, "programs": before[1] - before[0]}
    result["later_programs"] = programs() - before[1]
    for index, kind in enumerate(("wall", "cpu")):
        ours, theirs = ([times[index] for times in spent[name]] for name in ("isoshard", "jax"))
        result[f"isoshard_{kind}"] = tokens / statistics.median(ours)
        result[f"jax_{kind}"] = tokens / statistics.median(theirs)
        pairs = [jax / own for own, jax in zip(ours, theirs, strict=True)]
        result[f"ratio_{kind}"] = statistics.median(pairs)
    return result


def mixed_requests(count: int, vocabulary: int) -> list[tuple[list[int], int]]:
    """Prompts of 1 to 64 tokens, and how many new tokens each gets, 1 to 32."""
    draw = random.Random(0)
    return [
        ([draw.randrange(vocabulary) for _ in range(draw.randint(1, 64))], draw.randint(1, 32))
        for _ in range(count)
    ]


def _contestants(size: llama.Size) -> tuple[dict[str, Any], Any]:
    from isoshard.torch_bridge.serving import Engine, SamplingParams  # imports transformers

    torch.manual_seed(0)
    model = llama.build(size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # logits that differ
    mesh = make_mesh()
    model = iso.shard(model, mesh, iso.Plan.from_hf_tp_plan(model, axis="model"))
    params = {name: iso.to_jax(w.detach().clone()) for name, w in model.named_parameters()}
    by_hand = SlotLoop(params, size, mesh, SLOTS, MAX_LENGTH, BUCKETS)
    engine = Engine(model, slots=SLOTS, max_length=MAX_LENGTH, buckets=BUCKETS)

    def serve(work: list[tuple[list[int], int]]) -> list[list[int]]:
        served = [engine.add_request(p, SamplingParams(max_tokens=new)) for p, new in work]
        while engine.step():
            pass
        return [request.tokens for request in served]

    programs = lambda: iso.metrics.counters()["compilations"]  # noqa: E731
    return {"isoshard": serve, "jax": by_hand.serve}, programs


def table(results: dict[str, dict[str, Any]]) -> Table:
    """Show what `measure` returned."""
    columns = {
        "tokens": "{tokens}",
        "isoshard, tokens/s": "{isoshard_wall:.0f}",
        "JAX by hand": "{jax_wall:.0f}",
        "ratio": "{ratio_wall:.2f}",
        "ratio by processor time": "{ratio_cpu:.2f}",
        "programs": "{programs}",
    }
    return tables.by_name("64 requests in 8 slots", columns, results)


markdown = tables.documented(table)


if __name__ == "__main__":
    main()
