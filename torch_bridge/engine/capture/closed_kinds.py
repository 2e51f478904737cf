"""Objects whose attributes are not all that they hold: methods, references, generators.

Of each kind it is known what is behind it, and what of that a program can change.

>>> bound = functools.partial(max, 1)
>>> [holder] = CLOSED[functools.partial](bound, "bound", ())
>>> holder.name(1), holder.read()[1]
('bound.args', (1,))
"""

from __future__ import annotations

import array
import contextvars
import functools
import gc
import os
import random
import threading
import types
import weakref
from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np
import torch

from .holders import Asked, Fields, Holder

_Found = Iterator[Holder | tuple[Any, str]]
"""What holds values, and objects to be followed with their names."""


def _method(method: Any, path: str, names: Container[str]) -> _Found:
    yield method.__self__, path.rpartition(".")[0] or "self"
    yield method.__func__, path


def _partial(partial: Any, path: str, names: Container[str]) -> _Found:
    yield Fields(partial, ("func", "args", "keywords"), f"{path}.")


def _wrapped(wrapper: Any, path: str, names: Container[str]) -> _Found:
    for name in ("__wrapped__", "__func__", "func"):
        yield getattr(wrapper, name, None), path


def _property(thing: Any, path: str, names: Container[str]) -> _Found:
    yield thing.fget, path


def _asked(thing: Any, path: str, names: Container[str]) -> _Found:
    ask = thing.get if isinstance(thing, contextvars.ContextVar) else thing
    yield Asked(ask, path)


def _local(thing: Any, path: str, names: Container[str]) -> _Found:
    yield Fields(thing, [key for key in vars(thing) if key in names], f"{path}.")


def _proxy(thing: Any, path: str, names: Container[str]) -> _Found:
    for behind in gc.get_referents(thing):
        yield behind, path


def _bytes(thing: Any, path: str, names: Container[str]) -> _Found:
    yield Asked(functools.partial(bytes, thing), path)


def _random(thing: Any, path: str, names: Container[str]) -> _Found:
    yield Asked(thing.getstate, f"the state of {path}")


def _seed(thing: Any, path: str, names: Container[str]) -> _Found:
    """A step that draws with it on the CPU is refused."""
    yield Asked(thing.initial_seed, f"the seed of {path}")


def _numpy_random(thing: Any, path: str, names: Container[str]) -> _Found:
    bits = getattr(thing, "bit_generator", None)
    ask = (lambda: str(bits.state)) if bits is not None else (lambda: str(thing.get_state()))
    yield Asked(ask, f"the state of {path}")


def _environ(thing: Any, path: str, names: Container[str]) -> _Found:
    """`os.environ` is watched by the variables that were asked for."""
    return iter(())


CLOSED: dict[type, Callable[[Any, str, Container[str]], _Found]] = {
    types.MethodType: _method,
    functools.partial: _partial,
    type(functools.lru_cache(len)): _wrapped,
    staticmethod: _wrapped,
    classmethod: _wrapped,
    functools.cached_property: _wrapped,
    property: _property,
    weakref.ref: _asked,
    contextvars.ContextVar: _asked,
    threading.local: _local,
    type(os.environ): _environ,
    types.MappingProxyType: _proxy,
    array.array: _bytes,
    bytearray: _bytes,
    memoryview: _bytes,
    random.Random: _random,
    torch.Generator: _seed,
    np.random.Generator: _numpy_random,
    np.random.RandomState: _numpy_random,
}
"""By exact class, what is behind an object: `(object, its name, names that the code mentions)`."""
