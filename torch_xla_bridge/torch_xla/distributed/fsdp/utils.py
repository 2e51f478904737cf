"""Checkpointing, a patch of `nn.Linear`, and collectives that do nothing.

The latter stand in for the collectives of processes. Here one process drives all devices, so each
sees a world of one.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from isoshard.torch_bridge.kit import XLAPatchedLinear, checkpoint_module

__all__ = [
    "BucketizedReduceScatter",
    "DummyReduceScatter",
    "XLAPatchedLinear",
    "apply_xla_patch_to_nn_linear",
    "checkpoint_module",
    "dummy_all_gather",
    "dummy_all_reduce",
]


def _xla_patched_nn_linear_forward(m: Any, input: torch.Tensor) -> torch.Tensor:
    return XLAPatchedLinear.apply(input, m.weight, m.bias)


def apply_xla_patch_to_nn_linear(
    module: torch.nn.Module,
    patched_function: Callable[..., torch.Tensor] = _xla_patched_nn_linear_forward,
) -> torch.nn.Module:
    """Give every `nn.Linear` of a module another `forward`, also where it is checkpointed.

    Layers whose `forward` is not `nn.Linear`'s own are left alone.

    Args:
        module: changed in place.
        patched_function: called with the layer and its input.

    Returns:
        `module` itself.
    """
    layers: Iterable[Any] = module.modules()
    for layer in layers:
        for name in ("forward", "_xla_checkpointed_forward_original"):
            method = getattr(layer, name, None)
            if getattr(method, "__func__", None) is torch.nn.Linear.forward:
                layer._nn_linear_forward_original = method
                setattr(layer, name, types.MethodType(patched_function, layer))
    return module


def dummy_all_gather(value: torch.Tensor, dim: int = 0, groups: Any = None) -> torch.Tensor:
    """A copy of what every process has, one after the other; there is one process.

    Args:
        value: any tensor.
        dim: ignored with one process.
        groups: ignored.
    """
    return value.repeat((1,) * value.dim())


def dummy_all_reduce(reduce_type: str, inputs: Any, scale: float = 1.0, groups: Any = None) -> Any:
    """Scale, without a reduction.

    Args:
        reduce_type: ignored.
        inputs: a tensor, or a list of them that is scaled in place.
        scale: the factor.
        groups: ignored.

    Returns:
        A new tensor, or a list of the tensors given.
    """
    if isinstance(inputs, torch.Tensor):
        return inputs * scale
    return [tensor.mul_(scale) for tensor in inputs]


class DummyReduceScatter:
    """This process's part of its own tensor, which is all of it, without a reduction.

    Args:
        shard_count: processes, which is 1.

    Raises:
        ValueError: it is more.
    """

    def __init__(self, shard_count: int):
        """See the class."""
        _check_alone(shard_count)
        self.scale = 1.0

    def __call__(self, input: torch.Tensor, callback: Callable[[torch.Tensor], Any]) -> None:
        """Hand the tensor to `callback`."""
        callback(input)

    def flush(self) -> None:
        """Nothing waits."""


class BucketizedReduceScatter:
    """Collects tensors, and hands them on scaled when there are enough of them.

    Args:
        bucket_size_mb: how many MiB are enough.
        shard_count: processes, which is 1.
        groups: ignored.
        pin_layout: ignored.

    Raises:
        ValueError: there are more processes.
    """

    def __init__(self, bucket_size_mb: float, shard_count: int, groups: Any, pin_layout: bool):
        """See the class."""
        _check_alone(shard_count)
        self.bucket_size_bytes = bucket_size_mb * 1024 * 1024
        self.scale = 1.0
        self._waiting: list[tuple[torch.Tensor, Callable[[torch.Tensor], Any]]] = []

    def __call__(self, input: torch.Tensor, callback: Callable[[torch.Tensor], Any]) -> None:
        """Take a tensor; `callback` gets it now or later."""
        self._waiting.append((input, callback))
        if sum(tensor.nbytes for tensor, _ in self._waiting) > self.bucket_size_bytes:
            self.flush()

    def flush(self) -> None:
        """Hand on what waits."""
        waiting, self._waiting = self._waiting, []
        for tensor, callback in waiting:
            callback(tensor * self.scale)


def _check_alone(shard_count: int) -> None:
    if shard_count != 1:
        raise ValueError(
            f"there is one process, which drives all devices, so shard_count is 1, not "
            f"{shard_count}. Split tensors over devices with xs.mark_sharding."
        )
