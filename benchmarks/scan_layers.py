"""Compile time and memory by depth: a decoder's layers one by one, and as one loop.

"loop" is Python's, over the layers; "scan" is `xs.scan_layers`, "scan, checkpoint" computes the
layers again in backward, and "separate" keeps a parameter for each layer (`stacked=False`).

Each measurement is a process of its own: a decoder of the given depth, AdamW and clipping, one
`compile`d training step. "first call" is everything until the first loss: Python code, tracing and
XLA's compilation. Then the compiled program's own time and memory.

    python -m benchmarks.scan_layers            # 4 and 48 layers, written to results/
    python -m benchmarks.scan_layers --quick    # 2 and 4 layers, nothing written
"""

from __future__ import annotations

import collections
import statistics
import time
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import isoshard.torch_bridge as xs
from benchmarks.models.block import Block
from isoshard import metrics
from tools.harness import calls, tables, timing
from tools.harness.command import Benchmark

VOCABULARY, LENGTH, BATCH, HEADS = 256, 32, 4, 4
VARIANTS = ("loop", "scan", "scan, checkpoint", "separate")
PARTS = ("step", "forward and backward")
ROUNDS = 5


class Decoder(nn.Module):
    """A decoder-only language model."""

    def __init__(self, layers: int, width: int):
        """Make the modules."""
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, HEADS, causal=True) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map `(batch, length)` token numbers to logits."""
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def measure(variant: str, part: str, layers: int, width: int) -> dict[str, Any]:
    """One variant at one depth, in this process."""
    torch.manual_seed(0)
    model = Decoder(layers, width).to("jax")
    if variant != "loop":
        blocks = xs.scan_layers(
            model.blocks,
            checkpoint=variant == "scan, checkpoint",
            stacked=variant != "separate",
        )
        model.blocks = nn.ModuleList([blocks])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        if part == "step":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return loss.detach()

    step = xs.compile(step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1)).to("jax")
    inputs = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    xs.sync(wait=True)
    metrics.reset()
    started, worked = time.perf_counter(), time.process_time()
    loss = step(*inputs).item()
    first, work = time.perf_counter() - started, time.process_time() - worked
    times = [timing.seconds(lambda: step(*inputs).item()) for _ in range(ROUNDS)]
    memory = xs.memory_analysis(step)
    return {
        "result": loss,
        "first_call_s": first,
        "first_call_cpu_s": work,  # of all threads; steadier on a busy machine
        "xla_s": sum(compilation.seconds for compilation in metrics.compilations()),
        "step_ms": statistics.median(times) * 1e3,
        "arguments_mib": memory.argument_size_in_bytes / 2**20,
        "temporaries_mib": memory.temp_size_in_bytes / 2**20,
    }


def table(results: dict[str, Any]) -> Table:
    """Show the first calls of the flattest and of the deepest model."""
    rows_of = collections.defaultdict[str, dict[str, Any]](dict)
    for name, row in results.items():
        what, _, kind = name.rpartition(", ")
        if kind.endswith(" layers"):
            rows_of[what].setdefault("flat", row)
            rows_of[what] |= {"deep": row, "layers": kind}
        elif what:
            rows_of[what]["ratio"] = row
    columns = {
        "fewest layers": "{flat[first_call_s]:.1f} s",
        "most": "{deep[first_call_s]:.1f} s",
        "ratio": "{ratio:.2f}",
        "then a call": "{deep[step_ms]:.0f} ms",
    }
    return tables.by_name("first calls", columns, rows_of)


markdown = tables.documented(table)


def main() -> None:
    """Measure every variant at both depths."""
    benchmark = Benchmark("scan_layers", __doc__, quick=1, docs=("benchmarks.md", markdown))
    benchmark.add("--width", type=int, default=128)
    options = benchmark.parse()
    depths = (2, 4) if options.quick else (4, 48)
    results: dict[str, Any] = {}
    for part in PARTS:
        for variant in VARIANTS:
            for layers in depths:
                figures = calls.call(
                    "benchmarks.scan_layers:measure", variant, part, layers, options.width
                )
                results[f"{part}: {variant}, {layers} layers"] = figures
                print(
                    part, variant, layers, {k: round(v, 2) for k, v in figures.items()}, flush=True
                )
            deep, flat = (results[f"{part}: {variant}, {layers} layers"] for layers in depths[::-1])
            ratio = deep["first_call_s"] / flat["first_call_s"]
            results[f"{part}: {variant}, ratio of first calls"] = ratio
            print(f"{part}: {variant}: {depths[1]} layers / {depths[0]} layers = {ratio:.2f}")
    benchmark.finish({"width": options.width, **results})


if __name__ == "__main__":
    main()
