"""Core's verbs that move data, for DTensors: torch does it, by its own collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jax.sharding import Mesh

from isoshard.core.errors import ShardingError
from isoshard.core.layout.spec import SpecLike, named_sharding
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.argument_types import Leaf

from . import dtensor_exchange, dtensor_modules, translation

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def reshard(x: DTensor, spec: SpecLike, mesh: Mesh | None = None) -> DTensor:
    """Change the layout of a DTensor on its mesh.

    Args:
        x: any DTensor.
        spec: any spelling of a spec, by the names of the DTensor's mesh.
        mesh: the mesh of `spec`; another order or shape of the DTensor's devices.

    Returns:
        A new DTensor on the same DeviceMesh; gradients go through it.

    Raises:
        ShardingError: the spec does not fit.
        UnrepresentableError: no placements on the DTensor's mesh say it.
    """
    mesh = translation.jax_mesh(x.device_mesh) if mesh is None else mesh
    sharding = named_sharding(spec, mesh, x.ndim, name="DTensor")
    placements = translation.placements_on(sharding, x.device_mesh, x.ndim)
    return x.redistribute(placements=placements)


def full(x: DTensor) -> DTensor:
    """Gather a DTensor to every rank of its mesh; counted as "gathers" in `metrics`.

    Args:
        x: any DTensor.

    Returns:
        A DTensor replicated over the mesh; `x` itself if it is that.
    """
    from torch.distributed.tensor import Replicate

    if all(placement.is_replicate() for placement in x.placements):
        return x
    metrics.count("gathers")
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def refuse_shard(x: Leaf) -> None:
    """Raise ShardingError for what lies on a mesh of processes already, TypeError for an optimizer.

    Args:
        x: a tensor, module or optimizer.
    """
    if dtensor_exchange.is_dtensor(x):
        raise ShardingError(
            "a DTensor lies on a mesh of processes already; change its layout there with "
            "iso.reshard(x, spec), or hand its shards to JAX with iso.to_jax(x)"
        )
    if isinstance(x, torch.nn.Module) and dtensor_modules.has_dtensors(x):
        raise ShardingError(
            f"{type(x).__name__} is sharded over processes already, by torch; hand its tensors to "
            "JAX with iso.to_jax(module), or shard a module that is not"
        )
    if isinstance(x, torch.optim.Optimizer):
        raise TypeError(
            f"{type(x).__name__} is no array; shard the module before the optimizer is made, and "
            "its state follows; a Plan with memory= says where it rests. "
            "iso.to_jax(optimizer) gives the state it has."
        )
