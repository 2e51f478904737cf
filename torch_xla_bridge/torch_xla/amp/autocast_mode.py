"""Autocast for the logical device."""

from __future__ import annotations

import torch

from isoshard.torch_bridge.kit import naming


class autocast(torch.autocast):
    """Context in which operators that profit from it run in a lower precision.

    The same as `torch.autocast("jax", dtype)`, on every kind of chip. (torch_xla ignores it on
    CPUs.)

    Args:
        device: the logical device.
        enabled: False for a context that does nothing.
        dtype: `torch.bfloat16`, which is the default, or `torch.float16`.
        cache_enabled: keep cast weights within the context.

    Raises:
        ValueError: it is another device.

    >>> with autocast("jax:0"):
    ...     (torch.ones(2, 2, device="jax") @ torch.ones(2, 2, device="jax")).dtype
    torch.bfloat16
    """

    def __init__(
        self,
        device: str | torch.device,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        cache_enabled: bool = True,
    ):
        """See the class."""
        if str(device).partition(":")[0] not in naming.OURS:
            raise ValueError(
                f"this autocast is for {naming.current()}, not for {str(device)!r}; use "
                "torch.autocast there"
            )
        super().__init__("jax", dtype or torch.bfloat16, enabled, cache_enabled)
