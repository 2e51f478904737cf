"""Tensors without elements in the places of a model's own, for as long as a step is planned.

A parameter on the CPU or on "meta" cannot become one on the device and back and stay the same
object, whatever happens in between. So it is left alone: wherever Python holds it (a module, an
optimizer, a list, a closure) another tensor stands for it. A tensor on the device stays in its
place, and its memory has no elements meanwhile. In the end every place holds what it held, and so
does all else that the step has changed.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isoshard.core.kit import metrics
from isoshard.torch_bridge.kit import (
    Aval,
    ObjectWalk,
    Storage,
    Value,
    all_hooks,
    is_dropped,
    layout_numbers,
    lazy_tensor,
    marks,
    namespace,
    own_buffers,
    own_parameters,
    raw_gradient,
    runtime,
)

from .found_models import Named
from .planning_tape import ShapeOnly
from .user_lines import UserLines


class StandIns:
    """Context in which the tensors behind a step have no elements.

    Args:
        found: the objects behind the step.
        named: what its tensors are called, by id.
        mesh: what it is planned for.
        user: tells the user's lines.

    Attributes:
        tensors: by id of a tensor what stands for it; itself, if it is on the device.
        names: by id of a memory what its tensor is called.
    """

    def __init__(self, result: ObjectWalk, named: Mapping[int, Named], mesh: Mesh, user: UserLines):
        """See the class."""
        self._found, self._named, self._user = result, named, user
        self._whole = NamedSharding(mesh, PartitionSpec())
        self.tensors: dict[int, Any] = {}
        self.names: dict[int, Named] = {}
        self._kept: list[Any] = []
        self._memory: list[tuple[Storage, Value, Any]] = []
        self._own: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> StandIns:
        """Replace the tensors, or nothing if that fails."""
        result = self._found
        self._before = [(holder, holder.read()) for holder in result.sources]
        self._states = [
            (optimizer, {p: (state, dict(state)) for p, state in optimizer.state.items()})
            for optimizer in result.optimizers
        ]
        self._leaves = [(leaf, raw_gradient(leaf), leaf.requires_grad) for leaf in result.leaves()]
        self._seen = dict(result.tensors)
        self._counts = metrics.counters()
        self._pending = len(runtime.PENDING)
        numpy = np.random.get_state()  # noqa: NPY002  (what a step may draw from)
        self._random = random.getstate(), numpy, torch.get_rng_state()
        for module in result.modules:
            for own in (own_parameters(module), own_buffers(module)):
                self._own.append((own, dict(own)))
        try:
            self._replace()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Let everything hold what it held."""
        for storage, value, annotation in reversed(self._memory):
            storage.value, storage.annotation = value, annotation
        for holder, values in self._before:
            holder.restore(values)
        for own, values in self._own:
            _refill(own, values)
        for optimizer, states in self._states:
            optimizer.state.clear()
            for parameter, (state, values) in states.items():
                _refill(state, values)
                optimizer.state[parameter] = state
        for tensor, gradient, requires_grad in self._leaves:
            if raw_gradient(tensor) is not gradient:
                tensor.grad = gradient
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
        self._found.tensors.clear()
        self._found.tensors.update(self._seen)
        del runtime.PENDING[self._pending :]
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])  # noqa: NPY002
        torch.set_rng_state(self._random[2])
        for name, amount in metrics.counters().items():
            if amount != self._counts.get(name, 0):
                metrics.count(name, self._counts.get(name, 0) - amount)

    def again(self) -> None:
        """Let Python hold what it held when the context was entered, stand-ins in their places."""
        for holder, values in self._before:
            if not _is_state(holder, self._states):
                holder.restore([self.of(value) for value in values])

    def of(self, value: Any) -> Any:
        """What stands for a tensor, in a tuple too; any other value itself."""
        if type(value) is tuple:  # nobody can put anything else into it
            result = tuple(map(self.of, value))
            return value if all(map(operator.is_, result, value)) else result
        return self.tensors.get(id(value), value) if isinstance(value, torch.Tensor) else value

    def made(self, tensor: torch.Tensor, named: Named) -> Any:
        """A tensor without elements that is laid out."""
        shape = tuple(tensor.shape)
        aval = Aval.contiguous(shape, tensor.dtype)
        value = Value(
            ShapeOnly(shape, aval.physical, self._user), layout_numbers.intern(named.layout)
        )
        new: Any = marks.annotated(tensor, value, named.layout, shape)
        if not isinstance(tensor, lazy_tensor.LazyTensor):
            mine = namespace(new)
            mine.update({k: v for k, v in vars(tensor).items() if k not in mine})
            before, after = all_hooks(tensor)
            for hook in (before or {}).values():
                new.register_hook(hook)
            for hook in (after or {}).values():
                new.register_post_accumulate_grad_hook(hook)
        self.names[id(new._storage)] = named
        self._kept.append(new)
        return new

    def _replace(self) -> None:
        result = self._found
        named = dict(self._named)
        for optimizer in result.optimizers:
            self._name_state(optimizer, named)
        visited: dict[int, tuple[torch.Tensor, str]] = {}
        for key, (tensor, path) in list(result.tensors.items()):
            self._stand_in(tensor, named.get(key) or self._unnamed(tensor, path))
            new = self.of(tensor)
            visited[id(new)] = (new, path)
        for tensor in [p for o in result.optimizers for g in o.param_groups for p in g["params"]]:
            self._stand_in(tensor, named.get(id(tensor)) or self._unnamed(tensor, "parameter"))
        for module in result.modules:
            for tensor in (*own_parameters(module).values(), *own_buffers(module).values()):
                if tensor is not None:
                    self._stand_in(tensor, named.get(id(tensor)) or self._unnamed(tensor, ""))
        self.again()
        for own, values in self._own:
            _refill(own, {key: self.of(value) for key, value in values.items()})
        for optimizer, states in self._states:
            optimizer.state.clear()
            for parameter, (_, values) in states.items():
                optimizer.state[self.of(parameter)] = {
                    kind: self._of_state(value) for kind, value in values.items()
                }
        result.tensors.clear()
        result.tensors.update(visited)

    def _stand_in(self, tensor: torch.Tensor, named: Named | None) -> None:
        """Find what stands for a tensor, once; for nothing if it has no name and is on the CPU."""
        if id(tensor) in self.tensors or named is None:
            return
        if isinstance(tensor, lazy_tensor.LazyTensor):
            self._empty(tensor, named)
            self.tensors[id(tensor)] = tensor
        else:
            self.tensors[id(tensor)] = self.made(tensor, named)
        gradient = raw_gradient(tensor) if tensor.is_leaf else None
        if gradient is None or is_dropped(gradient):
            return
        named = Named(f"grad.{named.name}", "optimizer", named.layout, named.name)
        if isinstance(gradient, lazy_tensor.LazyTensor):
            self._empty(gradient, named)
        else:
            self.tensors[id(tensor)].grad = self.made(gradient, named)

    def _empty(self, tensor: lazy_tensor.LazyTensor, named: Named) -> None:
        """Let the memory of a tensor on the device have no elements."""
        storage = tensor._storage
        if id(storage) in self.names:
            return
        size, dtype = storage.aval.token
        layout = named.layout
        if size != tuple(tensor.shape):  # it is a view of more
            layout = self._whole
        self.names[id(storage)] = named
        self._kept.append(storage)
        self._memory.append((storage, storage.value, storage.annotation))
        empty = ShapeOnly(tuple(size), dtype, self._user)
        value = Value(empty, layout_numbers.intern(layout))
        value.memory = storage.id
        storage.value, storage.annotation = value, layout

    def _unnamed(self, tensor: torch.Tensor, path: str) -> Named | None:
        """Of a tensor that no model has: one on the CPU stays unless something trains it."""
        on_host = tensor.device.type not in ("meta",) and not isinstance(
            tensor, lazy_tensor.LazyTensor
        )
        trained = tensor.requires_grad and tensor.is_leaf
        if on_host and not trained:
            return None
        role = "parameter" if trained else "buffer"
        return Named(path or "tensor", role, self._whole)

    def _name_state(self, optimizer: torch.optim.Optimizer, named: dict[int, Named]) -> None:
        for parameter, state in optimizer.state.items():
            owner = named.get(id(parameter))
            for kind, value in state.items():
                if isinstance(value, torch.Tensor) and not _is_counter(value):
                    named[id(value)] = self.of_state(kind, value, parameter, owner)

    def of_state(
        self, kind: str, value: torch.Tensor, parameter: torch.Tensor, owner: Named | None
    ) -> Named:
        """What state of an optimizer is called, and how it lies."""
        of_state = owner is not None and value.shape == parameter.shape
        layout = owner.layout if owner is not None and of_state else self._whole
        name = "parameter" if owner is None else owner.name
        return Named(f"{kind}.{name}", "optimizer", layout, name if of_state else None)

    def _of_state(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and _is_counter(value):
            return value.clone()  # the step counts in it
        return self.of(value)


def _is_counter(value: torch.Tensor) -> bool:
    """Whether state is a number on the CPU: a count of steps."""
    return not value.ndim and value.device.type == "cpu"


def _is_state(holder: Any, states: list[Any]) -> bool:
    return any(holder.base is state.state for state, _ in states)


def _refill(own: dict[Any, Any], values: Mapping[Any, Any]) -> None:
    """Let a dictionary have these items and no others."""
    own.clear()
    own.update(values)
