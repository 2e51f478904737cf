"""torch_xla 2.9: SPMD over 8 virtual CPU devices on the (2, 4) mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as runtime

from benchmarks.models import sizes
from benchmarks.models.problem import MESH
from benchmarks.peers import clock


def measure(name: str, scale: str, steps: int) -> dict[str, Any]:
    """Train one problem."""
    runtime.use_spmd()
    count = runtime.global_runtime_device_count()
    mesh = spmd.Mesh(np.arange(count), tuple(MESH.values()), tuple(MESH))
    problem = sizes.problem(name, scale)
    module = problem.module().to("xla")
    for name, parameter in module.named_parameters():
        spmd.mark_sharding(parameter, mesh, padded_spec(problem.spec(name), parameter.dim()))
    optimizer = problem.optimizer(module.parameters())

    def load(number: int) -> tuple[torch.Tensor, ...]:
        batch = [part.to("xla") for part in problem.tensors(number)]
        for part in batch:
            spmd.mark_sharding(part, mesh, padded_spec(problem.batch_spec, part.dim()))
        return tuple(batch)

    def run(*batch: torch.Tensor) -> torch.Tensor:
        loss = problem.step(module, optimizer, *batch)
        optimizer.zero_grad()
        torch_xla.sync()
        return loss

    result = clock.timed(run, load, steps=steps, read=lambda loss: loss.item())
    return result | {"note": f"torch_xla {torch_xla.__version__}, SPMD"}


def padded_spec(spec: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """A spec with an entry for every axis, as torch_xla wants it."""
    return (*spec, *(None,) * (rank - len(spec)))
