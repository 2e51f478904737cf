"""A step on the CPU, and compiled on the device, with a change between two of its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import isoshard.torch_bridge as xs

BEFORE, AFTER = 3, 2


def around(
    make: Callable[[str], Any],
    step: Callable[[Any, torch.Tensor], torch.Tensor],
    change: Callable[[Any], object],
    x: torch.Tensor,
) -> tuple[tuple[list[Any], Any], tuple[list[Any], Any]]:
    """Run a step before and after a change.

    Args:
        make: what the step and the change find, on a device.
        step: of it and of `x`.
        change: of it.
        x: what each call gets, moved to the device.

    Returns:
        Of the CPU, and of the device: the results of all calls as Python numbers, and what was
        found, as it is afterwards.
    """
    ran = []
    for device in ("cpu", "jax"):
        thing, given = make(device), x.to(device)

        def bound(given: torch.Tensor, thing: Any = thing) -> torch.Tensor:
            return step(thing, given)

        run = xs.compile(bound) if device == "jax" else bound
        results = [run(given).tolist() for _ in range(BEFORE)]
        change(thing)
        ran.append((results + [run(given).tolist() for _ in range(AFTER)], thing))
    cpu, ours = ran
    return cpu, ours
