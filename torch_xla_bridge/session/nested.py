"""Replace values anywhere inside lists, dictionaries and objects; containers keep their types.

>>> def is_number(value):
...     return type(value) is int
>>> rewrite({"x": [1, "a"], "y": (2,)}, is_number, lambda number, path: f"{path} = {number}")
{'x': ["['x'][0] = 1", 'a'], 'y': ("['y'][0] = 2",)}
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

Select = Callable[[Any], bool]

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Tensor)
NO_CONTAINERS = (type, types.FunctionType, types.ModuleType, types.MethodType)
"""Classes whose attributes are not searched."""


class DataWrapper:
    """A base class for data that declares which of its tensors go to the device."""

    def get_tensors(self) -> list[Any]:
        """The CPU tensors to send."""
        raise NotImplementedError(f"{type(self).__name__} has no get_tensors()")

    def from_tensors(self, tensors: list[Any]) -> Any:
        """The same data with other tensors."""
        raise NotImplementedError(f"{type(self).__name__} has no from_tensors(tensors)")


def rewrite(
    value: Any,
    select: Select,
    change: Callable[[Any, str], Any],
    *,
    opaque: tuple[type, ...] = (),
) -> Any:
    """A structure with every selected value changed.

    Lists, tuples, named tuples, sets, mappings with their keys, `DataWrapper`s and the attributes
    of other objects are searched, those of `opaque` classes excepted. An object without any is
    returned as it is, and one that is referenced twice is changed once. The batch sizes of a
    `PackedSequence` remain, as torch requires them on the CPU.
    """
    return _Rewriter(select, change, (*NO_CONTAINERS, *opaque)).of(value, "")


def with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type, and with the same attributes, with other items."""
    if type(mapping) is dict:
        return items
    if isinstance(mapping, MutableMapping):
        new = copy.copy(mapping)
        if items.keys() != mapping.keys():
            new.clear()
        for key, item in items.items():
            new[key] = item
        return new
    kind: Any = type(mapping)
    return kind(items)


class _Rewriter:
    def __init__(self, select: Select, change: Callable[[Any, str], Any], opaque: tuple[type, ...]):
        self._select = select
        self._opaque = opaque
        self._change = change
        self._done: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any, path: str) -> Any:
        if id(value) in self._done:
            return self._done[id(value)][1]
        if self._select(value):
            return self._keep(value, self._change(value, path))
        if isinstance(value, _PLAIN):
            return value
        self._keep(value, value)  # it may contain itself
        return self._keep(value, self._container(value, path))

    def _keep(self, old: Any, new: Any) -> Any:
        self._done[id(old)] = (old, new)  # a reference to `old`, so that its id is not reused
        return new

    def _container(self, value: Any, path: str) -> Any:
        if isinstance(value, PackedSequence):
            names = [name for name in value._fields if name != "batch_sizes"]
            fields = {name: self.of(getattr(value, name), f"{path}.{name}") for name in names}
            return PackedSequence(**fields, batch_sizes=value.batch_sizes)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            names = value._fields
            return type(value)(*(self.of(getattr(value, n), f"{path}.{n}") for n in names))
        if isinstance(value, list):
            new = self._keep(value, copy.copy(value))  # a subclass keeps its attributes
            new[:] = [self.of(item, f"{path}[{n}]") for n, item in enumerate(value)]
            return new
        if isinstance(value, tuple):
            return type(value)(self.of(item, f"{path}[{n}]") for n, item in enumerate(value))
        if isinstance(value, set | frozenset):
            return type(value)(self.of(item, f"{path}{{..}}") for item in value)
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, DataWrapper):
            fields = value.get_tensors()
            return value.from_tensors([self.of(p, f"{path}[{n}]") for n, p in enumerate(fields)])
        if hasattr(value, "__dict__") and not isinstance(value, self._opaque):
            return self._object(value, path)
        return value

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        items = {
            self.of(key, f"{path}.keys()"): self.of(item, f"{path}[{key!r}]")
            for key, item in value.items()
        }
        return with_items(value, items)

    def _object(self, value: Any, path: str) -> Any:
        new = {name: self.of(item, f"{path}.{name}") for name, item in vars(value).items()}
        if all(item is new[name] for name, item in vars(value).items()):
            return value
        result = copy.copy(value)
        vars(result).update(new)
        return result
