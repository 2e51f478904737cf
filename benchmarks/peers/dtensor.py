"""DTensor: four processes with gloo, the specs as placements.

With torch 2.13 the gradient of `F.mse_loss` is not that of the whole batch where the batch is
split (the MLP's losses differ); the time it takes is the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.models import sizes
from benchmarks.models.problem import Spec
from benchmarks.peers import clock


def measure(name: str, scale: str, steps: int) -> dict[str, Any]:
    """Train one problem, as one rank of the group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    problem = sizes.problem(name, scale)
    mesh = mesh_of(problem.batch_spec)
    module = problem.module()
    for prefix, part in module.named_modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and not isinstance(parameter, DTensor):
                placed = placements(problem.spec(f"{prefix}.{name}".lstrip(".")), mesh)
                part._parameters[name] = torch.nn.Parameter(
                    distribute_tensor(parameter.data, mesh, placed)
                )
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = distribute_tensor(buffer, mesh)
    optimizer = problem.optimizer(module.parameters())

    def load(number: int) -> tuple[torch.Tensor, ...]:
        placed = placements(problem.batch_spec, mesh)
        return tuple(distribute_tensor(part, mesh, placed) for part in problem.tensors(number))

    def run(*batch: torch.Tensor) -> torch.Tensor:
        # Masks and counters are plain tensors; of the CPU's attention kernels one has a rule.
        with implicit_replication(), sdpa_kernel(SDPBackend.MATH):
            return problem.step(module, optimizer, *batch)

    def read(loss: Any) -> float:
        return float(loss.full_tensor())

    result = clock.timed(run, load, steps=steps, read=read)
    dist.destroy_process_group()
    return result | {"note": f"4 processes, {tuple(mesh.shape)} mesh"}


def mesh_of(batch_spec: Spec) -> DeviceMesh:
    """(2, 2); (4, 1) where the batch is split over both axes, which DTensor cannot say."""
    shape = (4, 1) if any(isinstance(axes, tuple) for axes in batch_spec) else (2, 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "model"))


def placements(spec: Spec, mesh: DeviceMesh) -> list[Any]:
    """A spec as DTensor says it: per mesh axis, which tensor axis it splits."""
    where: dict[str, int] = {}
    for dim, axes in enumerate(spec):
        for axis in axes if isinstance(axes, tuple) else (axes,):
            if axis is not None:
                where[axis] = dim
    return [
        Shard(where[name]) if name in where and mesh.size(number) > 1 else Replicate()
        for number, name in enumerate(mesh.mesh_dim_names)
    ]
