"""Values anywhere inside lists, dictionaries and objects, found or replaced.

>>> data = {"x": [1, "a"], "y": (2,)}
>>> for_each_instance_rewrite(data, lambda value: isinstance(value, int), lambda n: n * 10)
{'x': [10, 'a'], 'y': (20,)}
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping
from typing import Any

Select = Callable[[Any], bool]

_NO_CONTAINERS = (type, types.FunctionType, types.MethodType, types.ModuleType)


class DataWrapper:
    """A base class for data that says itself which of its tensors go to the device."""

    def get_tensors(self) -> list[Any]:
        """The CPU tensors to send.

        Raises:
            NotImplementedError: the subclass does not say.
        """
        raise NotImplementedError(f"{type(self).__name__} has no get_tensors()")

    def from_tensors(self, tensors: list[Any]) -> Any:
        """The same data with other tensors.

        Args:
            tensors: one for each that `get_tensors` gave, in its order.

        Raises:
            NotImplementedError: the subclass does not say.
        """
        raise NotImplementedError(f"{type(self).__name__} has no from_tensors(tensors)")


def for_each_instance(value: Any, select_fn: Select, fn: Callable[[Any], Any]) -> None:
    """Call a function with every value that is selected, once for each object.

    Args:
        value: searched: lists, tuples, sets, dictionaries with their keys, `DataWrapper`s and the
            attributes of other objects.
        select_fn: says which.
        fn: called with each.
    """
    _visit(value, select_fn, fn, {})


def _visit(value: Any, select: Select, fn: Callable[[Any], Any], seen: dict[int, Any]) -> None:
    if id(value) in seen:
        return
    seen[id(value)] = value  # held, so that no other object gets its id
    if select(value):
        fn(value)
        return
    for part in _parts(value):
        _visit(part, select, fn, seen)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [part for item in value.items() for part in item]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, DataWrapper):
        return list(value.get_tensors())
    if hasattr(value, "__dict__") and not isinstance(value, _NO_CONTAINERS):
        return list(vars(value).values())
    return []


def for_each_instance_rewrite(value: Any, select_fn: Select, fn: Callable[[Any], Any]) -> Any:
    """The same structure with every selected value replaced.

    Containers keep their types, tuples and named tuples too. Objects without any selected value
    are returned as they are; what stands in two places is replaced once.

    Args:
        value: see `for_each_instance`.
        select_fn: says which.
        fn: makes the new value of the old one.
    """
    return _Rewriter(select_fn, fn).of(value)


class _Rewriter:
    def __init__(self, select: Select, fn: Callable[[Any], Any]):
        self._select = select
        self._fn = fn
        self._done: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        if id(value) in self._done:
            return self._done[id(value)][1]
        if self._select(value):
            return self._keep(value, self._fn(value))
        if isinstance(value, dict):
            return self._filled(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._keep(value, type(value)(*map(self.of, value)))
        if isinstance(value, list):
            new = self._keep(value, copy.copy(value))
            new[:] = [self.of(part) for part in value]
            return new
        if isinstance(value, tuple | set | frozenset):
            return self._keep(value, type(value)(self.of(part) for part in value))
        if isinstance(value, DataWrapper):
            parts = [self.of(part) for part in value.get_tensors()]
            return self._keep(value, value.from_tensors(parts))
        if hasattr(value, "__dict__") and not isinstance(value, _NO_CONTAINERS):
            return self._object(value)
        return value

    def _keep(self, old: Any, new: Any) -> Any:
        self._done[id(old)] = (old, new)
        return new

    def _filled(self, value: dict[Any, Any]) -> Any:
        new = self._keep(value, copy.copy(value))  # an OrderedDict keeps its class and attributes
        new.clear()
        for key, part in value.items():
            new[self.of(key)] = self.of(part)
        return new

    def _object(self, value: Any) -> Any:
        found: list[Any] = []
        for_each_instance(value, self._select, found.append)
        if not found:
            return self._keep(value, value)
        new = self._keep(value, copy.copy(value))
        vars(new).update({name: self.of(part) for name, part in vars(value).items()})
        return new


class ToXlaTensorArena:
    """Replaces many tensors of a structure by one call.

    Args:
        convert_fn: gets the list of all that are selected, and returns as many.
        select_fn: says which values it takes.

    >>> arena = ToXlaTensorArena(lambda numbers: [-n for n in numbers], lambda v: type(v) is int)
    >>> arena.transform([1, {"a": 2}])
    [-1, {'a': -2}]
    """

    def __init__(self, convert_fn: Callable[[list[Any]], list[Any]], select_fn: Select):
        """See the class."""
        self._convert = convert_fn
        self._select = select_fn

    def transform(self, inputs: Any) -> Any:
        """The structure with its selected values converted.

        Args:
            inputs: any nesting.

        Raises:
            ValueError: the conversion gave another number of values than it got.
        """
        found: list[Any] = []
        for_each_instance(inputs, self._select, found.append)
        made = self._convert(found) if found else []
        if len(made) != len(found):
            raise ValueError(f"convert_fn got {len(found)} values and returned {len(made)}")
        new = {id(old): value for old, value in zip(found, made, strict=True)}
        return for_each_instance_rewrite(inputs, self._select, lambda old: new[id(old)])
