"""What a step function holds on to: the modules and optimizers it can reach.

A compiled step replays tensor work only, so what Python would decide anew has to be watched:
whether modules are in training mode, which parameters require gradients, the hyperparameters of
optimizers. If one changes, another program is captured.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch

_DEPTH = 4


class Watched:
    """The modules and optimizers behind a function.

    Attributes:
        modules: every submodule, once.
        optimizers: every optimizer, once.
        parameters: every parameter of either, once.
    """

    def __init__(self, function: Any, arguments: Iterable[Any] = ()):
        """Search `function` (closure, globals it names, bound object, defaults) and `arguments`."""
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._seen: set[int] = set()
        self._visit(function, _DEPTH)
        for argument in arguments:
            self._visit(argument, _DEPTH)
        found: dict[int, torch.Tensor] = {}
        for module in self.modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    found[id(parameter)] = parameter
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found.update((id(parameter), parameter) for parameter in group["params"])
        self.parameters = list(found.values())

    def guard(self) -> tuple[Any, ...]:
        """Everything whose change asks for another program."""
        return (
            tuple([module.training for module in self.modules]),
            tuple([parameter.requires_grad for parameter in self.parameters]),
            tuple([_hyperparameters(group) for group in self.groups()]),
            torch.is_grad_enabled(),
        )

    def identity(self) -> tuple[int, ...]:
        """Which objects and memory the step works on; another one asks for another capture."""
        found: list[int] = []
        for module in self.modules:
            found += map(id, module._modules.values())
            for own in (module._parameters, module._buffers):
                for tensor in own.values():
                    found += (id(tensor), id(getattr(tensor, "_storage", None)))
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        found += (id(value), id(getattr(value, "_storage", None)))
        return tuple(found)

    def groups(self) -> Iterable[dict[str, Any]]:
        """Every parameter group of every optimizer."""
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    def _visit(self, thing: Any, depth: int) -> None:
        if depth < 0 or id(thing) in self._seen:
            return
        if isinstance(thing, torch.nn.Module):
            for module in thing.modules():
                if id(module) not in self._seen:
                    self._seen.add(id(module))
                    self.modules.append(module)
        elif isinstance(thing, torch.optim.Optimizer):
            self._seen.add(id(thing))
            self.optimizers.append(thing)
        elif isinstance(thing, list | tuple | set | frozenset):
            for item in thing:
                self._visit(item, depth - 1)
        elif isinstance(thing, dict):
            for item in thing.values():
                self._visit(item, depth - 1)
        else:
            self._visit_object(thing, depth)

    def _visit_object(self, thing: Any, depth: int) -> None:
        if isinstance(thing, functools.partial):
            self._visit([thing.func, thing.args, thing.keywords], depth)
        elif inspect.ismethod(thing):
            self._visit([thing.__self__, thing.__func__], depth)
        elif inspect.isfunction(thing):
            self._seen.add(id(thing))
            values = inspect.getclosurevars(thing)
            self._visit([values.nonlocals, values.globals, thing.__defaults__], depth)
        elif _is_plain_object(thing):
            self._seen.add(id(thing))
            self._visit(list(vars(thing).values()), depth - 1)


def _is_plain_object(thing: Any) -> bool:
    """An instance of a user's class: a trainer that holds model and optimizer, say."""
    if isinstance(thing, torch.Tensor | type) or inspect.ismodule(thing):
        return False
    root = type(thing).__module__.partition(".")[0]
    return root not in ("builtins", "torch", "jax", "jaxlib", "numpy") and hasattr(
        thing, "__dict__"
    )


def _hyperparameters(group: dict[str, Any]) -> tuple[Any, ...]:
    """The numbers of a parameter group, without the learning rate, which may change freely."""
    return tuple(
        (name, value)
        for name, value in group.items()
        if name not in ("params", "lr", "initial_lr")
        and (value is None or isinstance(value, bool | int | float | str | tuple))
    )


class Snapshot:
    """What a refused step must find again: gradients, optimizer state, step counters.

    Args:
        watched: the modules and optimizers of the step.
    """

    def __init__(self, watched: Watched):
        """See the class."""
        self._gradients = [(parameter, parameter.grad) for parameter in watched.parameters]
        self._states = [
            (optimizer, {key: dict(state) for key, state in optimizer.state.items()})
            for optimizer in watched.optimizers
        ]
        self._counters = [
            (value, value.clone())
            for _, states in self._states
            for state in states.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter)
        ]

    def restore(self) -> None:
        """Put everything back."""
        self.restore_gradients()
        for optimizer, states in self._states:
            optimizer.state.clear()
            optimizer.state.update(states)
        self.restore_counters()

    def restore_gradients(self) -> None:
        """Put the gradients back."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def restore_counters(self) -> None:
        """Put the CPU tensors of optimizer state back to their values."""
        with torch.no_grad():
            for value, before in self._counters:
                value.copy_(before)
