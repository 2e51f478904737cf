"""Batches: tensors anywhere inside lists, dictionaries and objects.

>>> rewrite({"x": [1, "a"], "y": (2,)}, int, lambda number, path: f"{path} = {number}")
{'x': ["['x'][0] = 1", 'a'], 'y': ("['y'][0] = 2",)}
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Tensor)
_NO_CONTAINERS = (type, types.FunctionType, types.ModuleType, types.MethodType, torch.nn.Module)


def rewrite(value: Any, kind: Any, change: Callable[[Any, str], Any]) -> Any:
    """A batch with every instance of `kind` changed; containers keep their types.

    Lists, tuples, named tuples, sets, mappings and the attributes of other objects are searched.
    An object without any is returned as it is, and what stands in two places is changed once.

    Args:
        value: the batch.
        kind: a class.
        change: makes the new leaf of the old one and its path, such as `"[0]['image']"`.

    Returns:
        The same structure.
    """
    return _Rewriter(kind, change).of(value, "")


def with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type with other items for the same keys."""
    if type(mapping) is dict:
        return items
    if isinstance(mapping, MutableMapping):
        new = copy.copy(mapping)
        for key, item in items.items():
            new[key] = item
        return new
    return type(mapping)(items)  # pyright: ignore[reportCallIssue]


class _Rewriter:
    def __init__(self, kind: Any, change: Callable[[Any, str], Any]):
        self._kind = kind
        self._change = change
        self._done: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any, path: str) -> Any:
        if id(value) in self._done:
            return self._done[id(value)][1]
        if isinstance(value, self._kind):
            return self._keep(value, self._change(value, path))
        if isinstance(value, _PLAIN):
            return value
        self._keep(value, value)  # met again inside itself
        return self._keep(value, self._container(value, path))

    def _keep(self, old: Any, new: Any) -> Any:
        self._done[id(old)] = (old, new)  # held, so that no other object gets its id
        return new

    def _container(self, value: Any, path: str) -> Any:
        if isinstance(value, PackedSequence):  # its batch sizes must stay on the CPU
            names = [name for name in value._fields if name != "batch_sizes"]
            parts = {name: self.of(getattr(value, name), f"{path}.{name}") for name in names}
            return PackedSequence(**parts, batch_sizes=value.batch_sizes)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            names = value._fields  # pyright: ignore[reportAttributeAccessIssue]
            return type(value)(*(self.of(getattr(value, n), f"{path}.{n}") for n in names))
        if isinstance(value, list | tuple):
            return type(value)(self.of(item, f"{path}[{n}]") for n, item in enumerate(value))
        if isinstance(value, set | frozenset):
            return type(value)(self.of(item, f"{path}{{..}}") for item in value)
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if hasattr(value, "__dict__") and not isinstance(value, _NO_CONTAINERS):
            return self._object(value, path)
        return value

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        items = {key: self.of(item, f"{path}[{key!r}]") for key, item in value.items()}
        return with_items(value, items)

    def _object(self, value: Any, path: str) -> Any:
        new = {name: self.of(item, f"{path}.{name}") for name, item in vars(value).items()}
        if all(item is new[name] for name, item in vars(value).items()):
            return value
        result = copy.copy(value)
        vars(result).update(new)
        return result
