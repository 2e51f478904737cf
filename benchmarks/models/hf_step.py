"""A training step of a model whose forward pass gives its own loss, as those of transformers do."""

from __future__ import annotations

from collections.abc import Callable

import torch


def training_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """A function of a batch that trains a model.

    Args:
        model: called with the batch by name; its result has a `loss`.
        optimizer: of its parameters.
    """

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
