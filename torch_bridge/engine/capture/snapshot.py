"""What a refused step must find again: gradients, optimizer state, step counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.module_fields import scaler_states

from .dropped_gradients import held
from .reachable import Reachable


def groups_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    """Every parameter group of every optimizer."""
    for optimizer in optimizers:
        yield from optimizer.param_groups


class Snapshot:
    """What a refused step must find again: gradients, optimizer state, step counters.

    Args:
        found: the objects behind the step.
        owners: every tensor that may have a gradient.
    """

    def __init__(self, found: Reachable, owners: Sequence[torch.Tensor]):
        """See the class."""
        self.gradients: list[tuple[torch.Tensor, Any]] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: list[tuple[torch.optim.Optimizer, dict[Any, Any]]] = []
        self._scalers: list[tuple[Any, dict[Any, Any]]] = []
        self._counters: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.include(owners, found.optimizers, found.scalers)

    def include(
        self,
        owners: Iterable[torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        scalers: Iterable[Any],
    ) -> None:
        """Remember more, which the step has not changed so far."""
        self.gradients += [(owner, held(owner)) for owner in owners]
        self._groups += [
            (group, {name: value for name, value in group.items() if name != "params"})
            for group in groups_of(optimizers)
        ]
        states = [
            (optimizer, {key: (state, dict(state)) for key, state in optimizer.state.items()})
            for optimizer in optimizers
        ]
        self._states += states
        self._scalers += [
            (scaler, {key: dict(state) for key, state in scaler_states(scaler).items()})
            for scaler in scalers
            if scaler.is_enabled()
        ]
        self._counters += [
            (value, value.clone())
            for _, known in states
            for _, state in known.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter)
        ]

    def restore(self) -> None:
        """Put everything back."""
        self.restore_gradients()
        for group, values in self._groups:
            group.update(values)
        for optimizer, states in self._states:
            optimizer.state.clear()
            for key, (state, values) in states.items():
                state.clear()
                state.update(values)
                optimizer.state[key] = state
        self.restore_scalers()
        self.restore_counters()

    def restore_scalers(self) -> None:
        """Let gradient scalers have unscaled what they had."""
        for scaler, states in self._scalers:
            scaler_states(scaler).clear()
            scaler_states(scaler).update({key: dict(s) for key, s in states.items()})

    def restore_gradients(self) -> None:
        """Put the gradients back."""
        for owner, gradient in self.gradients:
            owner.grad = gradient

    def restore_counters(self) -> None:
        """Put the CPU tensors of optimizer state back to their values."""
        with torch.no_grad():
            for value, before in self._counters:
                value.copy_(before)
