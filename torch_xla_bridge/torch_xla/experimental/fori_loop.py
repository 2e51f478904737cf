"""Loops whose number of steps depends on values, by torch_xla's names.

`torch._higher_order_ops.while_loop` works on the device without this module, as
`isoshard.torch_bridge.loops.control_flow` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from isoshard.torch_bridge.kit import FOLLOWED
from isoshard.torch_bridge.kit import while_loop as _while_loop

__all__ = ["fori_loop", "while_loop"]


def while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any] | None = None,
) -> Any:
    """Call `body_fn` on what it returned before, while `cond_fn` of that is True.

    Args:
        cond_fn: takes the carried and the additional tensors; returns one bool, a tensor.
        body_fn: takes the same, and returns the carried ones anew.
        carried_inputs: the first tensors to be carried; their shapes and dtypes stay.
        additional_inputs: tensors that are the same in each step.

    Returns:
        The last carried tensors.

    Raises:
        RuntimeError: a step returns another shape or dtype.

    >>> ten = torch.tensor(10, device="jax")
    >>> while_loop(lambda n, x: n > 0, lambda n, x: (n - 1, x + 2), (ten, ten))
    (tensor(0, device='jax:0'), tensor(30, device='jax:0'))
    """
    rest = tuple(additional_inputs or ())
    followed = FOLLOWED.resolve()
    return _while_loop(
        followed(lambda *carry: cond_fn(*carry, *rest)),
        followed(lambda *carry: tuple([output.clone() for output in body_fn(*carry, *rest)])),
        tuple(carried_inputs),
    )


def fori_loop(
    lower: torch.Tensor, upper: torch.Tensor, body_fun: Callable[..., Any], *input_value: Any
) -> tuple[Any, ...]:
    """Call `body_fun` on what it returned before, `upper - lower` times.

    Args:
        lower: an integer, a tensor of one element.
        upper: likewise.
        body_fun: takes and returns tensors (one alone, or a tuple), not the number of the step.
        *input_value: what it takes first.

    Returns:
        How many steps are left, which is 0, and what the last step returned.

    Raises:
        RuntimeError: a step returns another shape or dtype.

    >>> zero, five = torch.tensor(0, device="jax"), torch.tensor(5, device="jax")
    >>> fori_loop(zero, five, lambda x: x * 2, torch.tensor(1.0, device="jax"))
    (tensor(0, device='jax:0'), tensor(32., device='jax:0'))
    """
    followed = FOLLOWED.resolve()

    @followed
    def step(left: Any, *values: Any) -> tuple[Any, ...]:
        outputs = body_fun(*values)
        return (left - 1, *(outputs if isinstance(outputs, tuple | list) else (outputs,)))

    left = (upper - lower).clamp(min=0)
    goes_on = followed(lambda left, *_: (left > 0).reshape(()))
    return tuple(while_loop(goes_on, step, (left, *input_value)))
