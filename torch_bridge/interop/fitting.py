"""Which tensors can be arguments of one call on DTensors, and what to do with the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import torch

from isoshard.core.errors import ShardingError
from isoshard.core.runtime.caches import cached
from isoshard.torch_bridge.common.argument_types import PyTree
from isoshard.torch_bridge.dtensor.dtensor_exchange import is_dtensor
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.placements import translation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


def check(name: str, mesh: DeviceMesh, leaves: Iterable[Any], tree: PyTree) -> None:
    """Check that all tensors can be computed with together.

    A plain tensor of one element may stand beside DTensors, as in DTensor's own operations.

    Args:
        name: of the function that is called.
        mesh: of the first DTensor.
        leaves: the arguments.
        tree: the same as `(args, kwargs)`, for messages.

    Raises:
        ShardingError: DTensors lie on different meshes or have no part in this rank, are split
            unevenly, or hold sums that were not taken yet.
        TypeError: there are other tensors besides. All faults are in one message.
    """
    if not any(isinstance(leaf, torch.Tensor) and _fault(leaf, mesh) for leaf in leaves):
        return
    faults = []
    kind: type[Exception] = ShardingError
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        fault = _fault(leaf, mesh) if isinstance(leaf, torch.Tensor) else ""
        if fault:
            faults.append(f"argument {jax.tree_util.keystr(path[1:])} {fault}")
            kind = kind if is_dtensor(leaf) else TypeError
    raise kind(f"{name} is called with DTensors on {mesh}, but " + "; ".join(faults))


def _fault(leaf: torch.Tensor, mesh: DeviceMesh) -> str:
    """What is wrong with a tensor, and what to do; empty if nothing is."""
    if isinstance(leaf, lazy_tensor.LazyTensor):
        return (
            "is a tensor on the jax device of this process, and cannot be computed with together "
            "with DTensors of many; use one kind"
        )
    if not is_dtensor(leaf):
        if leaf.numel() == 1:
            return ""
        return (
            f"is a plain tensor of shape {tuple(leaf.shape)} on {leaf.device}; say where it lies: "
            "distribute_tensor(x, mesh, [Replicate(), ..]), or DTensor.from_local"
        )
    return _fault_of_layout(leaf.device_mesh, leaf.placements, leaf.shape, mesh)


@cached(4096)
def _fault_of_layout(
    own: DeviceMesh, placements: tuple[Placement, ...], size: torch.Size, mesh: DeviceMesh
) -> str:
    shape = tuple(size)
    if own != mesh:
        return (
            f"lies on {own}; DTensors of one call share one mesh (from a slice of it: "
            "DTensor.from_local(x.to_local(), mesh, [Replicate(), ..]))"
        )
    if mesh.get_coordinate() is None:
        return "has no part in this rank, which is outside the mesh; call it in the mesh's ranks"
    if any(placement.is_partial() for placement in placements):
        return (
            f"has placements {placements}: sums that were not taken yet; take them with "
            "x.redistribute(placements=[Replicate(), ..])"
        )
    if not translation.layout_of(placements, mesh, shape).is_even:
        return (
            f"has shape {shape}, which placements {placements} split unevenly; pad it, or "
            "redistribute it to Replicate()"
        )
    return ""
