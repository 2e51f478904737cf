"""Optimizers that skip a step where gradients overflowed, without asking the host.

They are torch's own, with `fused=True`: the step is one operation that looks at `found_inf` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _SyncFree(torch.optim.Optimizer):
    """What the three have in common."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any, *args: Any, **kwargs: Any):
        """As torch's optimizer of the same name, with `fused=True`."""
        if kwargs.get("fused") is None and not (kwargs.get("foreach") or kwargs.get("capturable")):
            kwargs["fused"] = True
        super().__init__(params, *args, **kwargs)

    def step(
        self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None
    ) -> Any:
        """Make a step, unless gradients overflowed.

        Args:
            closure: computes the loss anew; may be None.
            found_inf: a float32 tensor without axes on the device: 0 for a step, 1 for none. None
                for a step.

        Returns:
            What `closure` returns.

        Raises:
            ValueError: `found_inf` has axes, or the optimizer was made with `fused=False`.
        """
        if found_inf is None:
            return super().step(closure)
        if found_inf.dim():
            raise ValueError(f"found_inf is one number, and its shape is {tuple(found_inf.shape)}")
        if not all(group["fused"] for group in self.param_groups):
            raise ValueError(
                "found_inf needs the fused step: leave foreach and capturable away, and do not "
                "pass fused=False"
            )
        self.grad_scale, self.found_inf = None, found_inf
        try:
            return super().step(closure)
        finally:
            del self.grad_scale, self.found_inf


class SGD(_SyncFree, torch.optim.SGD):
    """`torch.optim.SGD` whose `step` takes `found_inf`."""


class Adam(_SyncFree, torch.optim.Adam):
    """`torch.optim.Adam` whose `step` takes `found_inf`."""


class AdamW(_SyncFree, torch.optim.AdamW):
    """`torch.optim.AdamW` whose `step` takes `found_inf`."""
