"""Tensors without elements in place of a model's own, while a step is planned.

A parameter on the CPU or on "meta" cannot become one on the device and back and stay the same
object, whatever happens in between. So wherever Python refers to it (a module, an optimizer, a
list, a closure) a placeholder replaces it. A tensor on the device remains, and its memory has no
elements meanwhile. At the end all references are restored, and all else that the step has changed.
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
    lazy_tensor,
    marks,
    namespace,
    own_buffers,
    own_parameters,
    raw_gradient,
    runtime,
    sharding_ids,
)

from .planning_tape import ShapeOnly
from .step_models import Named


class PlaceholderTensors:
    """Context in which the tensors that a step reads have no elements.

    Args:
        walk: the objects that the step reads.
        named: names and shardings of its tensors, by id.
        mesh: the mesh of the plan.

    Attributes:
        tensors: by id of a tensor its placeholder; itself, if it is on the device.
        names: by id of a storage the name of its tensor.
    """

    def __init__(self, walk: ObjectWalk, named: Mapping[int, Named], mesh: Mesh):
        """See the class."""
        self._walk, self._named = walk, named
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self.tensors: dict[int, Any] = {}
        self.names: dict[int, Named] = {}
        self._alive: list[Any] = []
        self._memory: list[tuple[Storage, Value, Any]] = []
        self._module_tensors: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> PlaceholderTensors:
        """Replace the tensors, or nothing if that fails."""
        walk = self._walk
        self._before = [(source, source.read()) for source in walk.sources]
        self._states = [
            (optimizer, {p: (state, dict(state)) for p, state in optimizer.state.items()})
            for optimizer in walk.optimizers
        ]
        self._leaves = [(leaf, raw_gradient(leaf), leaf.requires_grad) for leaf in walk.leaves()]
        self._walked_tensors = dict(walk.tensors)
        self._counts = metrics.counters()
        self._pending = len(runtime.PENDING)
        numpy = np.random.get_state()  # noqa: NPY002  (what a step may draw from)
        self._random = random.getstate(), numpy, torch.get_rng_state()
        for module in walk.modules:
            for tensors in (own_parameters(module), own_buffers(module)):
                self._module_tensors.append((tensors, dict(tensors)))
        try:
            self._replace()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Restore all references and states."""
        for storage, value, annotation in reversed(self._memory):
            storage.value, storage.annotation = value, annotation
        for source, values in self._before:
            source.restore(values)
        for tensors, values in self._module_tensors:
            _refill(tensors, values)
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
        self._walk.tensors.clear()
        self._walk.tensors.update(self._walked_tensors)
        del runtime.PENDING[self._pending :]
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])  # noqa: NPY002
        torch.set_rng_state(self._random[2])
        for name, amount in metrics.counters().items():
            if amount != self._counts.get(name, 0):
                metrics.count(name, self._counts.get(name, 0) - amount)

    def again(self) -> None:
        """Restore references as they were on entering, with placeholders for tensors."""
        for source, values in self._before:
            if not _is_state(source, self._states):
                source.restore([self.of(value) for value in values])

    def of(self, value: Any) -> Any:
        """The placeholder of a tensor, in a tuple too; any other value itself."""
        if type(value) is tuple:  # immutable, so it is not among the walk's sources
            replaced = tuple(map(self.of, value))
            return value if all(map(operator.is_, replaced, value)) else replaced
        return self.tensors.get(id(value), value) if isinstance(value, torch.Tensor) else value

    def placeholder(self, tensor: torch.Tensor, named: Named) -> Any:
        """A tensor without elements, with a sharding."""
        shape = tuple(tensor.shape)
        aval = Aval.contiguous(shape, tensor.dtype)
        value = Value(ShapeOnly(shape, aval.physical), sharding_ids.intern(named.layout))
        new: Any = marks.annotated(tensor, value, named.layout, shape)
        if not isinstance(tensor, lazy_tensor.LazyTensor):
            attributes = namespace(new)
            attributes.update({k: v for k, v in vars(tensor).items() if k not in attributes})
            before, after = all_hooks(tensor)
            for hook in (before or {}).values():
                new.register_hook(hook)
            for hook in (after or {}).values():
                new.register_post_accumulate_grad_hook(hook)
        self.names[id(new._storage)] = named
        self._alive.append(new)
        return new

    def _replace(self) -> None:
        walk = self._walk
        named = dict(self._named)
        for optimizer in walk.optimizers:
            self._name_state(optimizer, named)
        visited: dict[int, tuple[torch.Tensor, str]] = {}
        for key, (tensor, path) in list(walk.tensors.items()):
            self._add(tensor, named.get(key) or self._unnamed(tensor, path))
            new = self.of(tensor)
            visited[id(new)] = (new, path)
        for tensor in [p for o in walk.optimizers for g in o.param_groups for p in g["params"]]:
            self._add(tensor, named.get(id(tensor)) or self._unnamed(tensor, "parameter"))
        for module in walk.modules:
            for tensor in (*own_parameters(module).values(), *own_buffers(module).values()):
                if tensor is not None:
                    self._add(tensor, named.get(id(tensor)) or self._unnamed(tensor, ""))
        self.again()
        for tensors, values in self._module_tensors:
            _refill(tensors, {key: self.of(value) for key, value in values.items()})
        for optimizer, states in self._states:
            optimizer.state.clear()
            for parameter, (_, values) in states.items():
                optimizer.state[self.of(parameter)] = {
                    kind: self._of_state(value) for kind, value in values.items()
                }
        walk.tensors.clear()
        walk.tensors.update(visited)

    def _add(self, tensor: torch.Tensor, named: Named | None) -> None:
        """Add the placeholder of a tensor, once; none if it has no name and is on the CPU."""
        if id(tensor) in self.tensors or named is None:
            return
        if isinstance(tensor, lazy_tensor.LazyTensor):
            self._empty(tensor, named)
            self.tensors[id(tensor)] = tensor
        else:
            self.tensors[id(tensor)] = self.placeholder(tensor, named)
        gradient = raw_gradient(tensor) if tensor.is_leaf else None
        if gradient is None or is_dropped(gradient):
            return
        named = Named(f"grad.{named.name}", "optimizer", named.layout, named.name)
        if isinstance(gradient, lazy_tensor.LazyTensor):
            self._empty(gradient, named)
        else:
            self.tensors[id(tensor)].grad = self.placeholder(gradient, named)

    def _empty(self, tensor: lazy_tensor.LazyTensor, named: Named) -> None:
        """Let the memory of a tensor on the device have no elements."""
        storage = tensor._storage
        if id(storage) in self.names:
            return
        size, dtype = storage.aval.token
        layout = named.layout
        if size != tuple(tensor.shape):  # it is a view of more
            layout = self._replicated
        self.names[id(storage)] = named
        self._alive.append(storage)
        self._memory.append((storage, storage.value, storage.annotation))
        empty = ShapeOnly(tuple(size), dtype)
        value = Value(empty, sharding_ids.intern(layout))
        value.memory = storage.id
        storage.value, storage.annotation = value, layout

    def _unnamed(self, tensor: torch.Tensor, path: str) -> Named | None:
        """The name of a tensor that no model has; None of one on the CPU that is not trained."""
        on_host = tensor.device.type not in ("meta",) and not isinstance(
            tensor, lazy_tensor.LazyTensor
        )
        trained = tensor.requires_grad and tensor.is_leaf
        if on_host and not trained:
            return None
        role = "parameter" if trained else "buffer"
        return Named(path or "tensor", role, self._replicated)

    def _name_state(self, optimizer: torch.optim.Optimizer, named: dict[int, Named]) -> None:
        for parameter, state in optimizer.state.items():
            owner = named.get(id(parameter))
            for kind, value in state.items():
                if isinstance(value, torch.Tensor) and not _is_counter(value):
                    named[id(value)] = self.of_state(kind, value, parameter, owner)

    def of_state(
        self, kind: str, value: torch.Tensor, parameter: torch.Tensor, owner: Named | None
    ) -> Named:
        """The name and sharding of a tensor of an optimizer's state."""
        of_state = owner is not None and value.shape == parameter.shape
        layout = owner.layout if owner is not None and of_state else self._replicated
        name = "parameter" if owner is None else owner.name
        return Named(f"{kind}.{name}", "optimizer", layout, name if of_state else None)

    def _of_state(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and _is_counter(value):
            return value.clone()  # the step counts in it
        return self.of(value)


def _is_counter(value: torch.Tensor) -> bool:
    """Whether state is a scalar on the CPU: a count of steps."""
    return not value.ndim and value.device.type == "cpu"


def _is_state(source: Any, states: list[Any]) -> bool:
    return any(source.base is state.state for state, _ in states)


def _refill(dictionary: dict[Any, Any], values: Mapping[Any, Any]) -> None:
    """Replace all items of a dictionary."""
    dictionary.clear()
    dictionary.update(values)
