"""Benchmark: the host's time of a compiled step, beside `jax.jit` of the same program.

    python -m benchmarks.replaying [--quick] [--rounds N]

A training step of `xs.compile` over 10, 150 and 1,000 tensors: small parameters of nested modules,
with SGD, or with AdamW and its two averages, in torch's foreach form. Its call looks up the
program, checks what the step has read, gathers arrays, runs the program, and puts the results where
they belong.

The baseline is the same program under `jax.jit`, called with the same arrays in a flat list and the
same ones donated; nothing is gathered, checked or put anywhere. Both are timed until the call
returns, in turns; the devices finish outside of the time. The target is 1.3 times the baseline and
100 us.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rich.table import Table

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.compiling import plan_lowering
from tools.harness import tables, timing
from tools.harness.command import Benchmark

COUNTS = (10, 150, 1000)
QUICK = (10, 30)
GROUP = 10  # parameters of one innermost module
FACTOR, EXTRA_US = 1.3, 100.0
WARMUP = 5

OPTIMIZERS: dict[str, tuple[int, Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": (1, lambda parameters: torch.optim.SGD(parameters, lr=0.01, foreach=True)),
    "AdamW": (3, lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True)),
}
"""Each with the tensors that it makes of a parameter."""


class Leaf(torch.nn.Module):
    """A few small parameters.

    Args:
        count: how many.
    """

    def __init__(self, count: int):
        """See the class."""
        super().__init__()
        self.gain = 1.0
        self.weights = torch.nn.ParameterList(torch.ones(4) / (n + 1) for n in range(count))

    def forward(self) -> torch.Tensor:
        """The sum of their squares."""
        return torch.cat(list(self.weights)).square().sum() * self.gain


class Nested(torch.nn.Module):
    """A tree of modules over `count` parameters; each has ten children at most."""

    def __init__(self, count: int):
        """See the class."""
        super().__init__()
        self.scale = 1.0
        if count <= GROUP:
            children = [Leaf(count)]
        else:
            part = GROUP ** (len(str(count - 1)) - 1)
            sizes = [min(part, count - start) for start in range(0, count, part)]
            children = [Nested(size) for size in sizes]
        self.parts = torch.nn.ModuleList(children)

    def forward(self) -> torch.Tensor:
        """The sum over all children."""
        return torch.stack([part() for part in self.parts]).sum() * self.scale


def main() -> None:
    """Run the benchmark and save `benchmarks/results/replaying.json`."""
    benchmark = Benchmark(
        "replaying", __doc__, rounds=200, quick=20, docs=("benchmarks.md", markdown)
    )
    options = benchmark.parse()
    counts = QUICK if options.quick else COUNTS
    results = {
        f"{name}, {count} tensors": measure(name, count, rounds=options.rounds)
        for name in OPTIMIZERS
        for count in counts
    }
    benchmark.finish(results, table(results))


def measure(name: str, count: int, *, rounds: int) -> dict[str, float]:
    """Time a compiled step and the jitted program in turns.

    Args:
        name: of the optimizer.
        count: tensors that each call reads and writes: parameters and optimizer state.
        rounds: timed calls of each.

    Returns:
        Median and best microseconds of both, the ratio and difference of the medians, the medians
        of ratio and difference over the rounds, and the arrays that the program takes.
    """
    step, batch = compiled_step(name, count)
    jitted, arrays = jitted_program(step.last)
    contestants = {"replay": lambda: step(batch), "jit": jitted}
    times = timing.interleave(
        contestants, rounds=rounds, warmup=WARMUP, settle=lambda _: xs.sync(wait=True)
    )
    pairs = list(zip(times["replay"], times["jit"], strict=True))
    replay, jit = (statistics.median(times[who]) * 1e6 for who in ("replay", "jit"))
    return {
        "arrays": arrays,
        "replay_us": replay,
        "jit_us": jit,
        "best_replay_us": min(times["replay"]) * 1e6,
        "best_jit_us": min(times["jit"]) * 1e6,
        "ratio": replay / jit,
        "difference_us": replay - jit,
        "paired_ratio": timing.paired(times["replay"], times["jit"]),
        "paired_difference_us": statistics.median(ours - theirs for ours, theirs in pairs) * 1e6,
        "allowed_us": FACTOR * jit + EXTRA_US,
    }


def compiled_step(name: str, count: int) -> tuple[xs.CompiledStep, torch.Tensor]:
    """A captured training step whose parameters and state are `count` tensors, and its argument."""
    each, make = OPTIMIZERS[name]
    model: Any = Nested(max(1, count // each)).to("jax")
    optimizer = make(model.parameters())

    @xs.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model() * x
        loss.backward()
        optimizer.step()
        return loss.detach()

    batch = torch.ones(()).to("jax")
    for _ in range(WARMUP):
        step(batch)
    xs.sync(wait=True)
    return step, batch


def jitted_program(replay: Any) -> tuple[Callable[[], Any], int]:
    """The program of a captured step under `jax.jit`.

    Args:
        replay: of the step.

    Returns:
        A function that calls it, and the number of arrays that it takes. The arrays given up in one
        call are replaced by results, as a training loop does.
    """
    plan, compiled = replay.plan, replay.program.compiled
    function = jax.jit(plan_lowering.traceable(plan), donate_argnums=plan.donated, keep_unused=True)
    avals = jax.tree.leaves(compiled.in_avals)
    count = len(plan.leaves)
    arrays: list[Any] = [jnp.full(aval.shape, 0.5, aval.dtype) for aval in avals[:count]]
    rest = [np.full(aval.shape, 0.5, aval.dtype) for aval in avals[count:]]
    pairs = replaced(plan.donated, avals, jax.eval_shape(function, *arrays, *rest))

    def call() -> Any:
        results = function(*arrays, *rest)
        for position, number in pairs:
            arrays[position] = results[number]
        return results

    return call, len(avals)


def replaced(donated: tuple[int, ...], avals: Any, results: Any) -> list[tuple[int, int]]:
    """Which result takes the place of which donated input: the next one of its shape and dtype."""
    free = list(range(len(results)))
    pairs = []
    for position in donated:
        aval = (avals[position].shape, avals[position].dtype)
        for number in free:
            if (results[number].shape, results[number].dtype) == aval:
                free.remove(number)
                pairs.append((position, number))
                break
    return pairs


def table(results: dict[str, dict[str, float]]) -> Table:
    """Show what `measure` found."""
    columns = {
        "arrays": "{arrays}",
        "xs.compile": "{replay_us:.0f}",
        "jax.jit": "{jit_us:.0f}",
        "ratio": "{ratio:.2f}",
        "difference": "{difference_us:.0f}",
        "allowed": "{allowed_us:.0f}",
        "": "{said}",
    }
    within = {True: "within", False: "above"}
    rows = {
        name: {**row, "said": within[row["replay_us"] <= row["allowed_us"]]}
        for name, row in results.items()
    }
    return tables.by_name("host time of a call until it returns, medians in us", columns, rows)


markdown = tables.documented(table)


if __name__ == "__main__":
    main()
