"""Loss scaling for float16 on the logical device."""

from __future__ import annotations

import torch


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for the logical device.

    With `fused=True` optimizers, and those of `amp.syncfree`, nothing is read on the host.

    Args:
        init_scale: the first factor.
        growth_factor: it grows by this after `growth_interval` steps without overflow.
        backoff_factor: and shrinks by this after an overflow.
        growth_interval: a number of steps.
        enabled: False for a scaler that does nothing.
        use_zero_grad: not used; torch_xla clears gradients instead of skipping a step with it.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        use_zero_grad: bool = False,
    ):
        """See the class."""
        super().__init__("jax", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
