"""The contestants of `benchmarks.training` that share its process: one step, made ready in ways.

Each holds its own copy of the parameters and a few batches that lie on the devices already. Those
in processes of their own are in `benchmarks.peers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jax.sharding import Mesh

import isoshard as iso
import isoshard.torch_bridge as xs
from benchmarks.by_hand import models
from benchmarks.by_hand.step import P, Training
from benchmarks.contestant import Contestant
from benchmarks.models.problem import Problem


def pure_jax(problem: Problem, mesh: Mesh) -> Contestant:
    """The hand-written jitted step."""
    training = Training(models.by_hand(problem), mesh)
    return Contestant(
        "pure JAX",
        training.run,
        training.batch,
        training.compiled.as_text,
        training.compiled.memory_analysis,
    )


def compiled_torch(problem: Problem, mesh: Mesh) -> Contestant:
    """The torch step captured by `xs.compile`."""
    module, optimizer = _on_mesh(problem, mesh)
    step = xs.compile(lambda *batch: problem.step(module, optimizer, *batch))
    return Contestant(
        "torch, compiled",
        step,
        lambda number: _place(problem, mesh, number),
        lambda: xs.program_text(step),
        lambda: xs.memory_analysis(step),
    )


def lazy_torch(problem: Problem, mesh: Mesh) -> Contestant:
    """The torch step as it is, recorded anew each time; gradients are dropped before it runs."""
    module, optimizer = _on_mesh(problem, mesh)

    def run(*batch: torch.Tensor) -> torch.Tensor:
        loss = problem.step(module, optimizer, *batch)
        optimizer.zero_grad()
        xs.sync()
        return loss

    return Contestant("torch, lazy", run, lambda number: _place(problem, mesh, number))


def cpu_torch(problem: Problem, mesh: Mesh) -> Contestant:
    """Plain torch on the CPU, unsharded: for comparison only."""
    return _plain("torch, CPU", problem, "cpu")


def cuda_torch(problem: Problem, mesh: Mesh) -> Contestant:
    """Plain torch on the GPU."""
    return _plain("torch, CUDA eager", problem, "cuda")


def cuda_inductor(problem: Problem, mesh: Mesh) -> Contestant:
    """Torch on the GPU with the model compiled by inductor."""
    return _plain("torch.compile, CUDA", problem, "cuda", torch.compile)


ON_MESH = (pure_jax, compiled_torch, lazy_torch)
OURS = ("torch, compiled", "torch, lazy")


def _plain(
    name: str, problem: Problem, device: str, wrap: Callable[..., Any] = lambda module: module
) -> Contestant:
    module = problem.module().to(device)
    optimizer = problem.optimizer(module.parameters())
    model = wrap(module)
    return Contestant(
        name,
        lambda *batch: problem.step(model, optimizer, *batch),
        lambda number: tuple(tensor.to(device) for tensor in problem.tensors(number)),
    )


def _on_mesh(problem: Problem, mesh: Mesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    plan = iso.Plan([(pattern, P(*spec)) for pattern, spec in problem.specs], default=P())
    module = iso.shard(problem.module(), mesh, plan)
    return module, problem.optimizer(module.parameters())


def _place(problem: Problem, mesh: Mesh, number: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        iso.shard(tensor, mesh, P(*problem.batch_spec)) for tensor in problem.tensors(number)
    )
