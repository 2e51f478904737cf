"""Collectives with gradients, for one process that drives every device.

There is one replica, so a reduction over replicas is the value itself. What is split over devices
is split by `mark_sharding`, and XLA places the collectives.

>>> import torch, isoshard.torch_bridge
>>> x = torch.tensor([1.0, 2.0], device="jax", requires_grad=True)
>>> y = all_reduce("sum", x, scale=0.5)
>>> y.tolist()
[0.5, 1.0]
>>> y.sum().backward()
>>> x.grad.tolist()
[0.5, 0.5]
"""

from __future__ import annotations

import torch

from . import xla_model

__all__ = ["SyncBatchNorm", "all_gather", "all_reduce", "distributed_mm"]


def all_reduce(
    reduce_type: str, value: torch.Tensor, scale: float = 1.0, groups: list[list[int]] | None = None
) -> torch.Tensor:
    """Reduce over the replicas, of which there is one.

    Args:
        reduce_type: one of `xla_model.REDUCE_SUM` and its like.
        value: of any shape.
        scale: the result is multiplied by it.
        groups: None, or one group of the one replica.

    Returns:
        A new tensor, through which gradients flow.

    Raises:
        ValueError: `reduce_type` is unknown, or `groups` name other replicas.
    """
    reduced = xla_model.all_reduce(reduce_type, value, groups=groups)
    assert isinstance(reduced, torch.Tensor)
    return reduced if scale == 1.0 else reduced * scale


def all_gather(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Gather from the replicas, of which there is one.

    Args:
        value: of any shape.
        dim: the axis along which replicas would be put one after the other.

    Returns:
        A new tensor, through which gradients flow.
    """
    return xla_model.all_gather(value, dim)


def distributed_mm(w: torch.Tensor, x: torch.Tensor, split: int = 1) -> torch.Tensor:
    """Multiply by a matrix whose columns are spread over the replicas, of which there is one.

    Args:
        w: `(N, K)`.
        x: `(K, M)`.
        split: multiply in so many parts of `M`, which it divides.

    Returns:
        `w @ x`, `(N, M)`.

    Raises:
        ValueError: the shapes do not fit.
    """
    if x.size(0) != w.size(1) or x.size(1) % split:
        raise ValueError(
            f"w of shape {tuple(w.shape)} times x of shape {tuple(x.shape)} in {split} parts: "
            f"x needs {w.size(1)} rows, and columns that {split} divides"
        )
    chunks = torch.split(x, x.size(1) // split, dim=1)
    return torch.cat([w @ chunk for chunk in chunks], dim=1)


class SyncBatchNorm(torch.nn.Module):
    """Batch normalisation over the batches of all devices.

    A batch that is split over a mesh is one batch, so `torch.nn.BatchNorm2d` does the same.

    Args:
        num_features: channels, the second axis of the input.
        eps: added to the variance.
        momentum: weight of a new batch in the running mean and variance.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1):
        """See the class."""
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.weight = torch.nn.Parameter(torch.ones(num_features))
        self.bias = torch.nn.Parameter(torch.zeros(num_features))
        self.running_mean: torch.Tensor
        self.running_var: torch.Tensor
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Normalise a batch of shape `(batch, num_features, ..)`."""
        if not self.training:
            return self._affine(batch, self.running_mean, self.running_var)
        axes = [axis for axis in range(batch.dim()) if axis != 1]
        var, mean = torch.var_mean(batch, axes, correction=0)
        with torch.no_grad():
            self.running_mean.lerp_(mean.detach(), self.momentum)
            self.running_var.lerp_(var.detach(), self.momentum)
        return self._affine(batch, mean, var)

    def _affine(self, batch: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        shape = [1, self.num_features] + [1] * (batch.dim() - 2)
        scale = self.weight * torch.rsqrt(var + self.eps)
        return (batch - mean.view(shape)) * scale.view(shape) + self.bias.view(shape)

    def extra_repr(self) -> str:
        """As torch shows a batch norm."""
        return f"{self.num_features}, eps={self.eps}"
