"""Gradients summed over several batches, by torch_xla's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from isoshard.torch_bridge.kit import accumulate

__all__ = ["gradient_accumulation"]


def gradient_accumulation(
    train_step: Callable[..., Any],
    iterable_tensors: Sequence[torch.Tensor],
    model: torch.nn.Module,
    *carried_tensors: Any,
) -> Any:
    """Run a training step for each batch as one loop, and add the gradients up.

    Args:
        train_step: `(*batch, *carried) -> loss`, or `-> (loss, *carried)` if anything is carried.
        iterable_tensors: the leading axis of each goes over the batches.
        model: its parameters get the gradients of the mean loss, in addition to those they have.
        *carried_tensors: tensors that go from one batch to the next; or one tuple of them, or None,
            as in torch_xla after 2.9.

    Returns:
        The mean loss; with carried tensors a tuple of it and them.

    Raises:
        ValueError: the batches are none, empty, no tensors, or of different numbers; or the loss
            does not depend on the model's parameters.
        TypeError: a carried tensor changes its shape or dtype.
    """
    if len(carried_tensors) == 1 and not isinstance(carried_tensors[0], torch.Tensor):
        carried_tensors = tuple(carried_tensors[0] or ())
    return accumulate(train_step, iterable_tensors, model, *carried_tensors)
