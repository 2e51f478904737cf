"""The contestants of `benchmarks.training`: one training step, made ready in four ways.

Each holds its own copy of the parameters and two batches that lie on the devices already. `step`
returns when the loss is there; so all outputs are, as they come from the same program.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import torch
from jax.sharding import Mesh

import isoshard as iso
import isoshard.torch_bridge as xs
from benchmarks.workload import P, Workload

BATCHES = 2


@dataclasses.dataclass
class Contestant:
    """A way to train.

    Attributes:
        name: for tables.
        run: `(*batch) -> loss`, which need not wait for the loss.
        load: brings batch number `i` to the devices.
        program: the optimised HLO of the step, once it has run; None where there is none.
        memory: XLA's account of its memory; likewise.
    """

    name: str
    run: Callable[..., Any]
    load: Callable[[int], tuple[Any, ...]]
    program: Callable[[], str] | None = None
    memory: Callable[[], Any] | None = None

    def steps(self, count: int) -> Callable[[], float]:
        """A function without arguments: `count` steps on a few batches, then the loss is read."""
        batches = itertools.cycle([self.load(number) for number in range(BATCHES)])

        def train() -> float:
            for _ in range(count):
                loss = self.run(*next(batches))
            return float(loss)

        return train

    def curve(self, steps: int) -> list[float]:
        """Train on `steps` different batches."""
        return [float(self.run(*self.load(number))) for number in range(steps)]


def pure_jax(workload: Workload, mesh: Mesh) -> Contestant:
    """The hand-written jitted step."""
    params = workload.jax_params(workload.torch_module(), mesh)
    held = [params, workload.jax_state(params, mesh)]
    step = workload.jax_step(mesh)
    compiled = step.lower(*held, *workload.jax_batch(0, mesh)).compile()

    def run(*batch: jax.Array) -> jax.Array:
        held[0], held[1], loss = step(*held, *batch)
        return loss

    return Contestant(
        "pure JAX",
        run,
        lambda number: workload.jax_batch(number, mesh),
        compiled.as_text,
        compiled.memory_analysis,
    )


def compiled_torch(workload: Workload, mesh: Mesh) -> Contestant:
    """The torch step captured by `xs.compile`."""
    module, optimizer = _on_mesh(workload, mesh)
    step = xs.compile(lambda *batch: workload.torch_step(module, optimizer, *batch))
    return Contestant(
        "torch, compiled",
        step,
        lambda number: _place(workload, mesh, number),
        lambda: xs.program_text(step),
        lambda: xs.memory_analysis(step),
    )


def lazy_torch(workload: Workload, mesh: Mesh) -> Contestant:
    """The torch step as it is, recorded anew each time; gradients are dropped before it runs."""
    module, optimizer = _on_mesh(workload, mesh)

    def run(*batch: torch.Tensor) -> torch.Tensor:
        loss = workload.torch_step(module, optimizer, *batch)
        optimizer.zero_grad()
        xs.sync()
        return loss

    return Contestant("torch, lazy", run, lambda number: _place(workload, mesh, number))


def cpu_torch(workload: Workload, mesh: Mesh) -> Contestant:
    """Plain torch on the CPU, unsharded: for comparison only."""
    module = workload.torch_module()
    optimizer = workload.torch_optimizer(module.parameters())
    return Contestant(
        "torch, CPU",
        lambda *batch: workload.torch_step(module, optimizer, *batch),
        lambda number: tuple(map(torch.from_numpy, workload.batch(number))),
    )


ON_MESH = (pure_jax, compiled_torch, lazy_torch)


def _on_mesh(workload: Workload, mesh: Mesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module = iso.shard(workload.torch_module(), mesh, iso.Plan(workload.specs))
    return module, workload.torch_optimizer(module.parameters())


def _place(workload: Workload, mesh: Mesh, number: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        iso.shard(torch.from_numpy(part), mesh, P("data")) for part in workload.batch(number)
    )
