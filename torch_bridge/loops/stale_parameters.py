"""Parameters that were replaced by others: an optimizer that still has one raises.

`scan_layers` makes new parameters. An optimizer made before would go on with the old ones, which no
module uses any more, and silently nothing would train:

>>> old = torch.nn.Parameter(torch.ones(2))
>>> optimizer = torch.optim.SGD([old], lr=0.1)
>>> retire([("0.weight", old)])
>>> optimizer.step()
Traceback (most recent call last):
    ...
RuntimeError: SGD.step(): scan_layers has copied 0.weight into parameters that hold all layers, and\
 nothing trains the old ones that this optimizer holds. Make it after scan_layers, from the module:\
 SGD(model.parameters(), ..), or keep the old ones: scan_layers(layers, stacked=False).

Replaced parameters that do get gradients are still in use, and are trained as usual. The check is a
hook before the steps of all optimizers, registered when the first parameter is replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_SHOWN = 3
_MARK = "_isoshard_retired"


def retire(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Note that these parameters were replaced."""
    for name, parameter in parameters:
        setattr(parameter, _MARK, name)
    _watch()


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    names = [
        getattr(parameter, _MARK)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is None and parameter.requires_grad and hasattr(parameter, _MARK)
    ]
    if names:
        kind = type(optimizer).__name__
        shown = ", ".join(names[:_SHOWN]) + (", .." if len(names) > _SHOWN else "")
        raise RuntimeError(
            f"{kind}.step(): scan_layers has copied {shown} into parameters that hold all layers, "
            "and nothing trains the old ones that this optimizer holds. Make it after scan_layers, "
            f"from the module: {kind}(model.parameters(), ..), or keep the old ones: "
            "scan_layers(layers, stacked=False)."
        )
