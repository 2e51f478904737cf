"""Benchmark: do reading, uploading and training overlap?

    python -m benchmarks.loading            # written to results/loading.json
    python -m benchmarks.loading --quick    # a few batches, nothing written

A compiled training step on 8 virtual devices, its parameters and its batch split over them, is
given batches that take as long to read as the step does. Timed are an epoch of reading alone, of
steps alone (on a batch that is there already), and of both through `MpDeviceLoader`. Perfect
overlap makes the last as long as the longer of the first two: a ratio of 1; none at all makes 2.

The headline is a loader that waits ("sleep"), as one does that reads a disk or a network. One that
computes with NumPy on one thread ("numpy") is measured too: here the virtual devices use all cores
of the machine, so it takes cores from the step, and its ratio says as much of the machine as of the
loader. On an accelerator both would have cores of their own. "in turns" is the same epoch with
nothing at the same time: each batch is read, uploaded and used, and its loss waited for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import torch
from rich.table import Table
from torch import nn

import isoshard.torch_bridge as xs
from isoshard.torch_xla_bridge.loading import MpDeviceLoader, ParallelLoader
from tools.harness import tables, timing
from tools.harness.command import Benchmark

DEVICES, ROWS, WIDTH, DEPTH = 8, 256, 512, 3
BATCHES, ROUNDS = 40, 5
TARGET = 1.15


class Work:
    """A compiled step, the spec of its batches, and how long one takes."""

    def __init__(self) -> None:
        """Compile the step."""
        self.mesh = xs.Mesh(range(DEVICES), (DEVICES,), ("data",))
        self.spec = xs.ShardingSpec(self.mesh, ("data", None))
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH)]
        model = nn.Sequential(*layers).to("jax")
        for parameter in model.parameters():
            xs.mark_sharding(parameter, self.mesh, ("data", *(None,) * (parameter.dim() - 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        @xs.compile
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        self.step = step
        self.batch = torch.randn(ROWS, WIDTH)
        [self.placed] = MpDeviceLoader([self.batch], "jax", input_sharding=self.spec)
        for _ in range(3):
            step(self.placed)
        self.seconds = statistics.median(
            timing.seconds(lambda: self.run(20)) / 20 for _ in range(3)
        )

    def run(self, count: int) -> None:
        """Steps on one batch, waited for at the end, as a loop that logs once an epoch."""
        self.over(self.placed for _ in range(count))

    def over(self, batches: Iterable[torch.Tensor]) -> None:
        """A step for each batch, waited for at the end."""
        loss: Any = None
        for batch in batches:
            loss = self.step(batch)
        loss.item()


class Sleeping:
    """Batches that a disk or a network takes its time for."""

    def __init__(self, batch: torch.Tensor, count: int, seconds: float):
        """Give `batch` `count` times, each after `seconds`."""
        self.batch, self.count, self.seconds = batch, count, seconds

    def __iter__(self) -> Iterator[torch.Tensor]:
        """One epoch."""
        for _ in range(self.count):
            time.sleep(self.seconds)
            yield self.batch


class Computing:
    """Batches that one thread computes with NumPy."""

    def __init__(self, batch: torch.Tensor, count: int, seconds: float):
        """Give `batch` `count` times, each after work that takes about `seconds`."""
        self.batch, self.count = batch, count
        self.data = batch.numpy()
        once = statistics.median(timing.seconds(self.augment) for _ in range(5))
        self.times = max(1, round(seconds / once))

    def augment(self) -> None:
        """A flip, a gain, and statistics of each row."""
        data = self.data[:, ::-1] * np.float32(1.1)
        data -= data.mean(1, keepdims=True)
        data /= data.std(1, keepdims=True)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """One epoch."""
        for _ in range(self.count):
            for _ in range(self.times):
                self.augment()
            yield self.batch


def measure(work: Work, source: Any, rounds: int) -> dict[str, Any]:
    """Epochs of reading, of steps, of both in turns, and of both at once; in turns themselves.

    Args:
        work: the step.
        source: the loader on the CPU.
        rounds: how many epochs of each.
    """
    loader = MpDeviceLoader(source, "jax", input_sharding=work.spec)
    at_once = ParallelLoader([], ["jax"], input_sharding=work.spec)

    def in_turns() -> None:
        for batch in source:
            work.over(at_once.send_cpu_data_to_device([batch], "jax"))

    times = timing.interleave(
        {
            "loader alone": lambda: [None for _ in source],
            "steps alone": lambda: work.run(source.count),
            "in turns": in_turns,
            "MpDeviceLoader": lambda: work.over(loader),
        },
        rounds=rounds,
        warmup=1,
    )
    longer = [max(pair) for pair in zip(times["loader alone"], times["steps alone"], strict=True)]
    return {
        "batches": source.count,
        "epoch": timing.summary(times, "MpDeviceLoader"),
        "ratio": timing.paired(times["MpDeviceLoader"], longer),
        "ratio_in_turns": timing.paired(times["in turns"], longer),
        "target": TARGET,
    }


def table(results: dict[str, dict[str, Any]]) -> Table:
    """Medians of an epoch, and the ratios."""
    ways = ("loader alone", "steps alone", "in turns", "MpDeviceLoader")
    columns = {way: f"{{epoch[{way}][median_ms]:.0f}} ms" for way in ways}
    columns |= {"ratio": "{ratio:.2f}", "target": "{target:.2f}"}
    batches = next(iter(results.values()))["batches"]
    return tables.by_name(f"an epoch of {batches} batches", columns, results)


def markdown(results: dict[str, Any]) -> str:
    """The table of docs/benchmarks.md.

    Args:
        results: the results.
    """
    return tables.in_markdown(table({name: results[name] for name in ("sleep", "numpy")}))


def main() -> None:
    """Run, print a table, and save `benchmarks/results/loading.json`."""
    benchmark = Benchmark(
        "loading", __doc__, rounds=ROUNDS, quick=2, docs=("benchmarks.md", markdown)
    )
    options = benchmark.parse()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    torch.set_num_threads(1)
    count = 8 if options.quick else BATCHES
    work = Work()
    results = {
        "sleep": measure(work, Sleeping(work.batch, count, work.seconds), options.rounds),
        "numpy": measure(work, Computing(work.batch, count, work.seconds), options.rounds),
    }
    step = work.seconds * 1e3
    benchmark.finish({"step_ms": step, **results}, f"a step takes {step:.1f} ms", table(results))


if __name__ == "__main__":
    main()
