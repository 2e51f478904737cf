"""Which gradients a step throws away by itself before it computes new ones.

A training step that calls `zero_grad()`, `backward()` and `optimizer.step()` leaves gradients
behind that its next call throws away unread. A captured program need not return them, which saves
the memory of all parameters. Whether a step is of this kind is seen while it is recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .reachable import Reachable


class Zeroing:
    """Context that notes whose gradients are set to None by `zero_grad()`.

    Args:
        found: the modules and optimizers whose calls are noted.
        is_written: whether the step has written to a parameter so far.
    """

    def __init__(self, found: Reachable, is_written: Callable[[torch.Tensor], bool]):
        """See the class."""
        self._holders: list[Any] = [*found.modules, *found.optimizers]
        self._is_listening = False
        self._is_written = is_written
        self._thrown: set[int] = set()
        self._own: list[tuple[dict[str, Any], Any]] = []

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether the step threw a parameter's gradient away before it updated the parameter."""
        return id(parameter) in self._thrown

    def __enter__(self) -> None:
        """Listen to `zero_grad` of every module and optimizer."""
        self._is_listening = True
        self._listen(self._holders)

    def include(self, holders: Sequence[Any]) -> None:
        """Listen to more modules and optimizers."""
        self._holders += holders
        if self._is_listening:
            self._listen(holders)

    def _listen(self, holders: Sequence[Any]) -> None:
        for holder in holders:
            attributes = vars(holder)
            self._own.append((attributes, attributes.get("zero_grad")))
            attributes["zero_grad"] = functools.partial(self._call, holder, holder.zero_grad)

    def __exit__(self, *exc: object) -> None:
        """Listen no more."""
        self._is_listening = False
        for attributes, before in self._own:
            del attributes["zero_grad"]
            if before is not None:
                attributes["zero_grad"] = before
        self._own.clear()

    def _call(self, holder: Any, zero_grad: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = zero_grad(*args, **kwargs)
        if kwargs.get("set_to_none", args[0] if args else True):
            for parameter in _parameters(holder):
                if parameter.grad is None and not self._is_written(parameter):
                    self._thrown.add(id(parameter))
        return result


def _parameters(holder: Any) -> list[torch.Tensor]:
    if isinstance(holder, torch.nn.Module):
        return list(holder.parameters())
    return [parameter for group in holder.param_groups for parameter in group["params"]]
