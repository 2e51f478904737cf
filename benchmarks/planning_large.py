"""Benchmark: what does it take to plan a Llama of 70B on 4,096 chips at depth "trace"?

    python -m benchmarks.planning_large [--quick]

A new Python process reads a configuration of transformers, traces its training step (layers as they
are written, no weights), and estimates it under FSDP x tensor. It tells the seconds of imports, and
of `estimate`; the most resident memory is what the kernel says of that process when it has ended.
No other work should run beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from rich.table import Table

from tools.harness import tables
from tools.harness.command import Benchmark

LAYERS = 80
QUICK = 4

_RUN = """
import json, sys, time
started = time.perf_counter()
import torch, transformers
import isoshard as iso
import isoshard.torch_bridge
imported = time.perf_counter()
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=int(sys.argv[1]),
        num_attention_heads=64, num_key_value_heads=8, vocab_size=128256, use_cache=False,
    ))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

def step(ids):
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss

mesh = iso.planner.topology("v5p:16x16x16").mesh((256, 16), ("data", "model"))
plan = iso.Plan.fsdp("data") * iso.Plan.tensor_parallel("model")
plan *= iso.Plan.batch_activations("data")
ids = torch.empty(1024, 4096, dtype=torch.long, device="meta")
began = time.perf_counter()
report = iso.planner.estimate(step, (ids,), mesh, plan)
print(json.dumps({
    "imports": imported - started,
    "estimate": time.perf_counter() - began,
    "parameters": sum(one.numel() for one in model.parameters()),
    "peak": report.memory.peak,
}))
"""


def measure(layers: int) -> dict[str, Any]:
    """Plan in a process of its own.

    Args:
        layers: of the model.

    Returns:
        Seconds of "imports", of "estimate" and "all" of the process; "resident", bytes at most;
        "parameters" of the model; "peak", bytes of one device as the report says.
    """
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", _RUN, str(layers)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        log = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"planning {layers} layers ended with status {process.returncode}")
    taken = time.perf_counter() - started
    return {**json.loads(log), "all": taken, "resident": used.ru_maxrss * 1024}


def main() -> None:
    """Run the benchmark and save `benchmarks/results/planning_large.json`."""
    benchmark = Benchmark("planning_large", __doc__, quick=1, docs=("benchmarks.md", markdown))
    options = benchmark.parse()
    layers = QUICK if options.quick else LAYERS
    rows = {f"Llama of {layers} layers, v5p:16x16x16": measure(layers)}
    benchmark.finish(rows, table(rows))


def table(results: dict[str, Any]) -> Table:
    """Show what `measure` found."""
    columns = {
        "imports (s)": "{imports:.1f}",
        "estimate (s)": "{estimate:.1f}",
        "all (s)": "{all:.1f}",
        "resident (bytes)": "{resident:,}",
    }
    return tables.by_name("a plan at depth 'trace'", columns, results)


markdown = tables.documented(table)


if __name__ == "__main__":
    main()
