"""Nested state dicts as flat ones: the names of their values in a checkpoint.

Dictionaries are always entered, lists only if they hold a tensor or a dictionary (as torch does, so
that torch's own planners read what is written here):

>>> flat, paths = flatten({"optim": {"state": {0: {"step": 3}}, "betas": [0.9, 0.99]}})
>>> flat
{'optim.state.0.step': 3, 'optim.betas': [0.9, 0.99]}
>>> paths["optim.state.0.step"]
('optim', 'state', '0', 'step')
>>> unflatten(flat, paths)
{'optim': {'state': {'0': {'step': 3}}, 'betas': [0.9, 0.99]}}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .tensor_shards import HostShards

Path = tuple[str | int, ...]
"""The keys that lead to a value: strings in dictionaries, numbers in lists."""


def flatten(state_dict: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Name every value of a nested state dict.

    Args:
        state_dict: dictionaries and lists of tensors and other values, nested.

    Returns:
        The values by name (the keys joined by dots), and the path of each name.

    Raises:
        ValueError: two values have the same name.
    """
    flat: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for path, value in _walk((), state_dict):
        name = ".".join(map(str, path))
        if name in flat:
            raise ValueError(
                f"two values of the state dict have the name {name!r}: those at {paths[name]} and "
                f"{path}; rename one of them"
            )
        flat[name], paths[name] = value, path
    return flat, paths


def unflatten(flat: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """Nest the values again; every key of a dictionary is then a string.

    Args:
        flat: values by name.
        paths: the path of each name.
    """
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        set_element(nested, paths[name], value)
    return nested


def set_element(root: Any, path: Path, value: Any) -> None:
    """Put a value into a nested state dict, making the dictionaries and lists on its way.

    Args:
        root: the outermost dictionary.
        path: the keys that lead to the value.
        value: anything.

    >>> root = {}
    >>> set_element(root, ("groups", 1, "lr"), 0.5)
    >>> root
    {'groups': [None, {'lr': 0.5}]}
    """
    container: Any = root
    for key, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(key, int):
            container.extend([None] * (key + 1 - len(container)))
        if following is None:
            container[key] = value
            return
        inner: Any = container[key] if isinstance(key, int) else container.get(key)
        if inner is None:
            inner = container[key] = [] if isinstance(following, int) else {}
        container = inner


def map_values(function: Callable[[Any], Any], state_dict: Mapping[Any, Any]) -> dict[str, Any]:
    """A state dict of the same structure with other values.

    Args:
        function: takes a value and returns the new one.
        state_dict: nested, as `flatten` takes it.
    """
    flat, paths = flatten(state_dict)
    return unflatten({name: function(value) for name, value in flat.items()}, paths)


def _walk(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk((*path, str(key)), item)
    elif isinstance(value, list) and _is_entered(value):
        for index, item in enumerate(value):
            yield from _walk((*path, index), item)
    else:
        yield path, value


def _is_entered(value: list[Any]) -> bool:
    return any(
        isinstance(item, Mapping | torch.Tensor | HostShards)
        or (isinstance(item, list) and _is_entered(item))
        for item in value
    )
