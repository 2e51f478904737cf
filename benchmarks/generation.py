"""Benchmark: `generate` of transformers on a mesh, beside a decoding loop written in JAX by hand.

    python -m benchmarks.generation [--quick] [--rounds N]

Llamas of 4, 16 and 32 layers (width 256; of 32 layers 128) on a (2, 4) mesh, with the model's own
tensor-parallel plan; 4 rows, a prompt of 16 tokens, 64 new ones, greedy. `generate` is called as
people write it, with nothing said about caches, and with the prompt on the CPU or on the device.

The baseline is a loop of one jitted step, whose static cache is donated: the prompt, then a token
at a time, which is read and fed back. It computes the same tokens; the benchmark fails if
one differs. The contestants take turns in one process. Processor seconds are of all its threads.
The target is a ratio of 1.15.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import isoshard as iso
import isoshard.torch_bridge as xs  # noqa: F401
from benchmarks.by_hand.decoding import Decoding
from isoshard import P
from isoshard.core.runtime import metrics
from tools.harness import tables
from tools.harness.command import Benchmark

LAYERS = {4: 256, 16: 256, 32: 128}
"""Layers -> width."""
QUICK = {2: 64}
ROWS, PROMPT, NEW, VOCABULARY = 4, 16, 64, 2048
TARGET = 1.15
WARMUP = 2


def main() -> None:
    """Run the benchmark and save `benchmarks/results/generation.json`."""
    benchmark = Benchmark(
        "generation", __doc__, rounds=9, quick=3, docs=("benchmarks.md", markdown)
    )
    options = benchmark.parse()
    iso.simulate_devices(8)
    sizes = QUICK if options.quick else LAYERS
    results = {
        str(layers): measure(layers, width, rounds=options.rounds)
        for layers, width in sizes.items()
    }
    benchmark.finish(results, table(results))


def model_of(layers: int, width: int) -> LlamaForCausalLM:
    """A Llama of random weights, whose likeliest tokens are not close to others."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return model


def measure(layers: int, width: int, *, rounds: int) -> dict[str, dict[str, Any]]:
    """Time `generate` and the loop by hand in turns.

    Returns:
        Of each: median milliseconds a token, wall and processor, with their ratios to the loop; and
        the programs of the first calls and of all later ones.
    """
    model = model_of(layers, width)
    ids = torch.randint(3, VOCABULARY, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(ids, **options)
    mesh = iso.make_mesh((2, 4), ("data", "model"))
    model = iso.shard(model, mesh, iso.Plan.from_hf_tp_plan(model, axis="model"))
    split = iso.shard(ids, mesh, P("data"))
    by_hand = Decoding(model, mesh, ROWS, PROMPT + NEW)
    prompt = np.asarray(ids, np.int32)
    contestants: dict[str, Callable[[], Any]] = {
        "prompt on the CPU": lambda: model.generate(ids, **options),
        "prompt on the device": lambda: model.generate(split, **options).cpu(),
        "by hand": lambda: torch.from_numpy(by_hand.generate(prompt, NEW)).long(),
    }
    metrics.reset()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    first: dict[str, int] = {}
    for turn in range(WARMUP + rounds):
        for name, run in contestants.items():
            wall, processor = time.perf_counter(), time.process_time()
            tokens = run()
            seconds = time.perf_counter() - wall, time.process_time() - processor
            if not torch.equal(tokens, expected):
                raise AssertionError(f"{name}: other tokens than on the CPU")
            if turn >= WARMUP:
                times[name].append(seconds)
        first = first or dict(metrics.counters())
    medians = {
        name: [statistics.median(column) for column in zip(*pairs, strict=True)]
        for name, pairs in times.items()
    }
    base = medians["by hand"]
    return {
        name: {
            "wall_ms": wall / NEW * 1e3,
            "wall_ratio": wall / base[0],
            "processor_ms": processor / NEW * 1e3,
            "processor_ratio": processor / base[1],
            **({} if name == "by hand" else programs(first, metrics.counters())),
        }
        for name, (wall, processor) in medians.items()
    }


def programs(first: Mapping[str, int], last: Mapping[str, int]) -> dict[str, int]:
    """The programs of the first calls, and those of later ones."""
    name = "compilations"
    return {"programs": first[name], "later": last[name] - first[name]}


def table(results: dict[str, dict[str, Any]]) -> Table:
    """The results for a terminal."""
    columns = {
        "wall ms": "{wall_ms:.1f}",
        "ratio": "{wall_ratio:.2f}",
        "processor ms": "{processor_ms:.1f}",
        "of it": "{processor_ratio:.2f}",
        "programs": "{programs}",
        "later": "{later}",
    }
    keys = ("layers", "")
    return tables.by_pair("greedy decoding, a token of four rows", keys, columns, results)


markdown = tables.documented(table)


if __name__ == "__main__":
    main()
