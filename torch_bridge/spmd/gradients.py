"""Sharding constraints on values inside a model, and on their gradients."""

from __future__ import annotations

from typing import Any

import torch

from isoshard.core.layout.spec import SpecLike
from isoshard.torch_bridge.common.argument_types import AutogradContext, DeviceTensor, MeshLike

from .marking import checked
from .uneven import constrained_evenly


class MarkShardingFunction(torch.autograd.Function):
    """`apply(tensor, mesh, partition_spec)`: a sharding constraint, on the gradient as well."""

    @staticmethod
    def forward(
        ctx: AutogradContext, torch_tensor: DeviceTensor, mesh: MeshLike, partition_spec: SpecLike
    ) -> torch.Tensor:
        """A copy of the tensor, with the sharding."""
        ctx.mesh, ctx.partition_spec = mesh, partition_spec
        t, sharding = checked(torch_tensor, mesh, partition_spec, "mark_sharding_with_gradients")
        return constrained_evenly(t, sharding)

    @staticmethod
    def backward(ctx: AutogradContext, *grad_output: Any) -> Any:
        """The gradient, with the same sharding."""
        gradient = MarkShardingFunction.apply(grad_output[0], ctx.mesh, ctx.partition_spec)
        return gradient, None, None


def mark_sharding_with_gradients(
    t: torch.Tensor, mesh: MeshLike, partition_spec: SpecLike
) -> torch.Tensor:
    """The same elements as a new tensor with a sharding, which the gradient gets as well.

    Args:
        t: on the `jax` device; it is not modified.
        mesh: an `xs.Mesh`, or a `jax.sharding.Mesh`.
        partition_spec: as for `mark_sharding`.

    Returns:
        The new tensor.

    Raises:
        SpecError: an entry is no axis of the mesh, an axis is used twice, or the ranks differ.
        ShardingError: `t` is on another device.

    Example:
        >>> import isoshard.torch_bridge as xs
        >>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
        >>> t = torch.ones(8, 8, device="jax")
        >>> mark_sharding_with_gradients(t, mesh, ("x", "y")).sharding_spec, t.sharding_spec
        ('{devices=[2,4]0,1,2,3,4,5,6,7}', '')
    """
    marked: Any = MarkShardingFunction.apply(t, mesh, partition_spec)
    return marked
