"""Optimization barriers, across which XLA's optimizer moves and fuses nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import torch

from isoshard.core.runtime.caches import cached
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge._torch_internals.tensor_fields import backward_hooks
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor


def optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """Put a barrier behind tensors: what is computed from them waits until all are computed.

    Args:
        tensors: on the `jax` device; their elements are not changed.
    """
    ours: list[Any] = [tensor for tensor in tensors if isinstance(tensor, XLAShardedTensor)]
    if not ours:
        return
    values = [lazy_tensor.read(tensor) for tensor in ours]
    results = tapes.recorder().record(_barrier(len(ours)), values)
    for tensor, value in zip(ours, results, strict=True):
        lazy_tensor.write(tensor, value)


def apply_backward_optimization_barrier(m: torch.nn.Module) -> None:
    """Keep XLA from fusing a module's backward pass with those of others.

    Otherwise the gradients of many layers may be in memory at once, to be reduced over devices
    together.

    Args:
        m: when the gradient of one of its inputs is computed, that and the gradients of its
            parameters, as far as they are computed, pass a barrier.
    """
    m.register_forward_pre_hook(_watch, with_kwargs=True)


def _watch(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    # A full backward hook would warn of a first module, whose inputs need no gradient, and would
    # make views of inputs, which then cannot be written in place.
    if not torch.is_grad_enabled():
        return
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, XLAShardedTensor) and leaf.requires_grad:
            hooks = (backward_hooks(leaf) or {}).values()  # a tensor may come again and again
            if not any(isinstance(h, functools.partial) and h.args == (module,) for h in hooks):
                leaf.register_hook(functools.partial(_apply_barrier, module))


def _apply_barrier(module: torch.nn.Module, gradient: torch.Tensor) -> None:
    gradients = [*(parameter.grad for parameter in module.parameters()), gradient]
    with torch.no_grad():
        optimization_barrier_([g for g in gradients if g is not None])


@cached(1024)
def _barrier(count: int) -> Recipe:
    def run(arrays: Any, _scalars: Any, _key: Any) -> list[jax.Array]:
        return list(jax.lax.optimization_barrier(tuple(arrays)))

    return Recipe("optimization_barrier", run, count)
