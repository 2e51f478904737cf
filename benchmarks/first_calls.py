"""Benchmark: the first call of a captured step, with and without an adapter of peft.

    python -m benchmarks.first_calls [--rounds 5]

The first call of a step of `xs.compile` searches what its code reads, records it and compiles it.
A language model with LoRA trains few parameters through much more code, which the search must not
follow further than it runs. Counted is processor time, of all threads, each in a new process; the
persistent compilation cache is off. Also told is what the same step takes without `xs.compile`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from rich.table import Table

from tools.harness import tables
from tools.harness.command import Benchmark

MODELS = ("plain", "LoRA")
_PROGRAM = """
import json, sys, time
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import isoshard.torch_bridge as xs

config = dict(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
)
model = LlamaForCausalLM(LlamaConfig(**config))
if sys.argv[1] == "LoRA":
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
model = model.to("jax")
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

def step(ids):
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss.detach()

ids = torch.randint(0, 128, (2, 16)).to("jax")
run = xs.compile(step) if sys.argv[2] == "captured" else step
started = time.process_time()
run(ids).item()
print(json.dumps(time.process_time() - started))
"""


def main() -> None:
    """Run the benchmark and save `benchmarks/results/first_calls.json`."""
    benchmark = Benchmark(
        "first_calls", __doc__, rounds=5, quick=1, docs=("benchmarks.md", markdown)
    )
    results = measure(benchmark.parse().rounds)
    benchmark.finish(results, table(results))


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Time first calls, in turns.

    Args:
        rounds: processes of each kind.

    Returns:
        By model the median seconds of processor time, captured and lazily.
    """
    kinds = [(model, way) for model in MODELS for way in ("captured", "lazy")]
    taken = [{kind: _first_call(*kind) for kind in kinds} for _ in range(rounds)]
    return {
        model: {
            way: statistics.median(record[model, way] for record in taken)
            for way in ("captured", "lazy")
        }
        for model in MODELS
    }


def _first_call(model: str, way: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, model, way],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def table(results: dict[str, dict[str, float]]) -> Table:
    """Show what `measure` found."""
    base = results["plain"]["captured"]
    columns = {
        "captured": "{captured:.1f}",
        "without xs.compile": "{lazy:.1f}",
        "of plain": "{ratio:.2f}",
    }
    rows = {name: {**row, "ratio": row["captured"] / base} for name, row in results.items()}
    return tables.by_name("first call of a step, seconds of processor time", columns, rows)


markdown = tables.documented(table)


if __name__ == "__main__":
    main()
