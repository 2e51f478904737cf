"""What the bridge keeps: the size of each of its tables.

A table is a container that outlives calls. It is found wherever it is: a global of a module of the
bridge, an attribute of a class, a variable that a function holds, or an attribute of an object in
another table.
"""

from __future__ import annotations

import collections
import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterator, Sized
from typing import Any

import torch

HOUSE = "isoshard."
PACKAGE = "isoshard.torch_bridge"
_DEPTH = 6
_CONTAINERS = (dict, list, set, frozenset)


def tables(least: int = 1) -> dict[str, int]:
    """The entries of each table of at least `least` entries, by where it is found."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for name, module in sorted(sys.modules.items()):
        if name.startswith(PACKAGE) and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                if not key.startswith("__"):
                    _walk(f"{name.removeprefix(PACKAGE)[1:]}.{key}", value, _DEPTH, seen, found)
    return {where: count for where, count in found.items() if count >= least}


def _walk(where: str, thing: Any, depth: int, seen: set[int], found: dict[str, int]) -> None:
    if depth < 0 or id(thing) in seen or isinstance(thing, types.ModuleType | torch.Tensor):
        return
    seen.add(id(thing))
    if _is_table(thing):
        found[where] = len(thing)
    for inner, value in _inside(thing):
        _walk(f"{where}{inner}", value, depth - 1, seen, found)


def _is_table(thing: Any) -> bool:
    kind = type(thing).__name__
    return isinstance(thing, _CONTAINERS) or (isinstance(thing, Sized) and "Weak" in kind)


def _inside(thing: Any) -> Iterator[tuple[str, Any]]:
    """What a thing holds, with names; of a large table a few entries stand for all."""
    if isinstance(thing, functools.partial):
        yield ".func", thing.func
    elif isinstance(thing, types.FunctionType):
        if thing.__module__ and thing.__module__.startswith(PACKAGE):
            cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
            for name, cell in cells:
                try:
                    yield f".<{name}>", cell.cell_contents
                except ValueError:
                    continue
    elif isinstance(thing, type):
        if thing.__module__.startswith(PACKAGE):
            for name, value in list(vars(thing).items()):
                if _is_table(value):
                    yield f".{name}", value
    elif isinstance(thing, dict | weakref.WeakValueDictionary):
        for key, value in list(thing.items())[:2000]:
            yield f"[{str(key)[:40]}]", value
        for name, value in getattr(thing, "__dict__", {}).items():
            if type(thing).__module__.startswith(HOUSE):
                yield f".{name}", value
    elif isinstance(thing, list | tuple):
        for value in thing[:50]:
            yield "[..]", value
    elif type(thing).__module__.startswith(PACKAGE):
        for name in (*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())):
            yield f".{name}", getattr(thing, name, None)


def instances() -> dict[str, int]:
    """How many objects there are of each class of the bridge."""
    found: dict[str, int] = {}
    for kind, count in collections.Counter(map(type, gc.get_objects())).items():
        if str(getattr(kind, "__module__", "")).startswith(PACKAGE):
            found[kind.__qualname__] = found.get(kind.__qualname__, 0) + count
    return found


def larger(before: dict[str, int], after: dict[str, int], by: int) -> list[tuple[str, int]]:
    """What grew by more than `by`, and by how much; the largest first."""
    grown = [(name, count - before.get(name, 0)) for name, count in after.items()]
    return sorted([one for one in grown if one[1] > by], key=lambda one: -one[1])
