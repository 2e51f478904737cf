"""Core's verbs that move data, for DTensors, by torch's own collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax.sharding import Mesh

from isoshard.core.layout.spec import SpecLike, named_sharding
from isoshard.core.runtime import metrics

from ..placements import translation

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def reshard(x: DTensor, mesh: Mesh | None, spec: SpecLike) -> DTensor:
    """Change the layout of a DTensor on its mesh.

    Args:
        x: any DTensor.
        mesh: the mesh of `spec`, another order or shape of the DTensor's devices; or None.
        spec: any spelling of a spec, by the names of the mesh.

    Returns:
        A new DTensor on the same DeviceMesh; gradients go through it.

    Raises:
        ShardingError: the spec does not fit.
        UnrepresentableError: no placements on the DTensor's mesh express it.
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
        A DTensor replicated over the mesh; `x` itself if it is replicated.
    """
    from torch.distributed.tensor import Replicate

    if all(placement.is_replicate() for placement in x.placements):
        return x
    metrics.count("gathers")
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
