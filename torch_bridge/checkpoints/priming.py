"""`prime_optimizer`: optimizer state before the first step, for a checkpoint to fill."""

from __future__ import annotations

from typing import TypeVar

import torch

from isoshard.torch_bridge.execution import runtime

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def prime_optimizer(optimizer: Optimizer) -> Optimizer:
    """Create an optimizer's state by a step with zero gradients; parameters are not changed.

    State is sharded as its parameter. It is that of one step: restore a checkpoint into it before
    training.

    Args:
        optimizer: whose state a checkpoint is to fill.

    Returns:
        `optimizer` itself.

    >>> import isoshard.torch_bridge as xs
    >>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    >>> weight = torch.nn.Parameter(torch.ones(4, 8, device="jax"))
    >>> _ = xs.mark_sharding(weight, mesh, ("x", None))
    >>> optimizer = prime_optimizer(torch.optim.AdamW([weight], lr=0.1))
    >>> optimizer.state[weight]["exp_avg"].partition_spec
    P('x',)
    >>> weight.grad is None, weight.sum().item()
    (True, 32.0)
    """
    parameters = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    saved = [(parameter.detach().clone(), parameter.grad) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        optimizer.step()
    finally:
        with torch.no_grad():
            for parameter, (value, gradient) in zip(parameters, saved, strict=True):
                parameter.copy_(value)
                parameter.grad = gradient
    runtime.sync()
    return optimizer
