"""Values anywhere inside lists, dictionaries and objects, found or replaced.

>>> data = {"x": [1, "a"], "y": (2,)}
>>> for_each_instance_rewrite(data, lambda value: isinstance(value, int), lambda n: n * 10)
{'x': [10, 'a'], 'y': (20,)}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isoshard.torch_xla_bridge.session.nested import NO_CONTAINERS, DataWrapper, Select, rewrite


def for_each_instance(value: Any, select_fn: Select, fn: Callable[[Any], Any]) -> None:
    """Call a function with every value that is selected, once for each object."""
    _visit(value, select_fn, fn, {})


def _visit(value: Any, select: Select, fn: Callable[[Any], Any], visited: dict[int, Any]) -> None:
    if id(value) in visited:
        return
    visited[id(value)] = value  # held, so that no other object gets its id
    if select(value):
        fn(value)
        return
    for child in _children(value):
        _visit(child, select, fn, visited)


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [child for item in value.items() for child in item]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, DataWrapper):
        return list(value.get_tensors())
    if hasattr(value, "__dict__") and not isinstance(value, NO_CONTAINERS):
        return list(vars(value).values())
    return []


def for_each_instance_rewrite(value: Any, select_fn: Select, fn: Callable[[Any], Any]) -> Any:
    """The same structure with every selected value replaced.

    Containers keep their types, tuples and named tuples too. Objects without any selected value
    are returned as they are; what stands in two places is replaced once.
    """
    return rewrite(value, select_fn, lambda old, _path: fn(old))


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
        """The structure with its selected values converted."""
        tensors: list[Any] = []
        for_each_instance(inputs, self._select, tensors.append)
        converted = self._convert(tensors) if tensors else []
        if len(converted) != len(tensors):
            raise ValueError(f"convert_fn got {len(tensors)} values and returned {len(converted)}")
        new = {id(old): value for old, value in zip(tensors, converted, strict=True)}
        return for_each_instance_rewrite(inputs, self._select, lambda old: new[id(old)])
