"""What a step function holds on to: the modules and optimizers it can reach.

A compiled step replays tensor work only, so what Python would decide anew has to be watched:
whether modules are in training mode, which parameters require gradients, the hyperparameters of
optimizers. If one changes, another program is captured.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.module_fields import (
    own_buffers,
    own_modules,
    own_parameters,
    scaler_states,
)

from .. import base

_DEPTH = 4


class Watched:
    """The modules and optimizers behind a function.

    Attributes:
        modules: every submodule, once.
        optimizers: every optimizer, once.
        scalers: every gradient scaler, once.
        parameters: every parameter of either, and every other leaf tensor found, once.
    """

    def __init__(self, function: Any, arguments: Iterable[Any] = ()):
        """Search `function` (closure, globals it names, bound object, defaults) and `arguments`."""
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scalers: list[torch.amp.GradScaler] = []
        self._seen: set[int] = set()
        self._tensors: list[tuple[Any, Any]] = []
        found: dict[int, torch.Tensor] = {}
        self._leaves = found
        self._visit(function, _DEPTH)
        own, leaves = len(self._tensors), dict(found)
        for argument in arguments:
            self._visit(argument, _DEPTH)
        del self._tensors[own:]  # tensors given as arguments may be others next time
        found.clear()
        found.update(leaves)
        for module in self.modules:
            for parameter in own_parameters(module).values():
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
            tuple([gradient_state(parameter.grad) for parameter in self.parameters]),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("jax") and torch.get_autocast_dtype("jax"),
        )

    def identity(self) -> tuple[int, ...]:
        """Which objects and memory the step works on; another one asks for another capture."""
        found: list[int] = []
        for module in self.modules:
            found += map(id, own_modules(module).values())
            for own in (own_parameters(module), own_buffers(module)):
                for tensor in own.values():
                    found += (id(tensor), id(getattr(tensor, "_storage", None)))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    found += (id(tensor), id(getattr(tensor, "_storage", None)))
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        found += (id(value), id(getattr(value, "_storage", None)))
        return tuple(found)

    def held(self, storages: Container[int]) -> list[Held]:
        """The variables and attributes in which the step found its tensors.

        Args:
            storages: ids of the memory that the step used.
        """
        held = [Held(holder, key, _held(holder, key)) for holder, key in self._tensors]
        return [one for one in held if id(getattr(one.tensor, "_storage", None)) in storages]

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
                    self._note_tensors(vars(module))
        elif isinstance(thing, torch.optim.Optimizer):
            self._seen.add(id(thing))
            self.optimizers.append(thing)
        elif isinstance(thing, torch.amp.GradScaler):
            self._seen.add(id(thing))
            self.scalers.append(thing)
        elif isinstance(thing, list | tuple):
            self._visit_items(thing, range(len(thing)), depth - 1)
        elif isinstance(thing, set | frozenset):
            self._visit_items(list(thing), range(len(thing)), depth - 1)
        elif isinstance(thing, dict):
            self._visit_items(thing, list(thing), depth - 1)
        else:
            self._visit_object(thing, depth)

    def _visit_items(self, holder: Any, keys: Iterable[Any], depth: int) -> None:
        for key in keys:
            self._note(holder, key)
            self._visit(_held(holder, key), depth)

    def _visit_object(self, thing: Any, depth: int) -> None:
        if isinstance(thing, functools.partial):
            self._visit([thing.func, thing.args, thing.keywords], depth)
        elif inspect.ismethod(thing):
            self._visit([thing.__self__, thing.__func__], depth)
        elif inspect.isfunction(thing):
            self._seen.add(id(thing))
            for cell in thing.__closure__ or ():
                self._visit_items(cell, ("cell_contents",), depth - 1)
            names = inspect.getclosurevars(thing).globals
            self._visit_items(thing.__globals__, names, depth - 1)
            self._visit(thing.__defaults__, depth)
        elif _is_plain_object(thing):
            self._seen.add(id(thing))
            self._visit_items(vars(thing), list(vars(thing)), depth - 1)

    def _note_tensors(self, attributes: dict[str, Any]) -> None:
        for name in attributes:
            self._note(attributes, name)

    def _note(self, holder: Any, key: Any) -> None:
        """Remember where a tensor was found, so that another one put there is noticed."""
        tensor = _held(holder, key)
        if isinstance(tensor, base.LazyTensor):
            self._tensors.append((holder, key))
            if tensor.requires_grad and tensor.is_leaf:
                self._leaves[id(tensor)] = tensor


@dataclasses.dataclass(frozen=True)
class Held:
    """A variable or attribute in which a step found a tensor.

    Attributes:
        holder: a list, a dictionary (of attributes or globals), or a closure's cell.
        key: which of its items.
        tensor: what was found.
    """

    holder: Any
    key: Any
    tensor: torch.Tensor

    def is_still_there(self) -> bool:
        """Whether nobody put another tensor in its place."""
        return _held(self.holder, self.key) is self.tensor


def _held(holder: Any, key: Any) -> Any:
    """What a list, a dictionary or a closure's cell holds; None where there is nothing any more."""
    try:
        return holder.cell_contents if isinstance(holder, types.CellType) else holder[key]
    except (KeyError, IndexError, ValueError):
        return None


def gradient_state(gradient: Any) -> Any:
    """What a program depends on in a gradient that it finds."""
    if not isinstance(gradient, base.LazyTensor):
        return None
    return (gradient._aval, gradient._chain, gradient._storage.value.layout)


def _is_plain_object(thing: Any) -> bool:
    """An instance of a user's class: a trainer that holds model and optimizer, say."""
    if isinstance(thing, torch.Tensor | type) or inspect.ismodule(thing):
        return False
    if type(thing).__module__.startswith("isoshard.torch_bridge."):
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
        owners: every tensor that may have a gradient.
    """

    def __init__(self, watched: Watched, owners: Sequence[torch.Tensor]):
        """See the class."""
        self.gradients = [(owner, owner.grad) for owner in owners]
        self._groups = [
            (group, {name: value for name, value in group.items() if name != "params"})
            for group in watched.groups()
        ]
        self._states = [
            (optimizer, {key: dict(state) for key, state in optimizer.state.items()})
            for optimizer in watched.optimizers
        ]
        self._scalers = [
            (scaler, {key: dict(state) for key, state in scaler_states(scaler).items()})
            for scaler in watched.scalers
            if scaler.is_enabled()
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
        for group, values in self._groups:
            group.update(values)
        for optimizer, states in self._states:
            optimizer.state.clear()
            optimizer.state.update(states)
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
