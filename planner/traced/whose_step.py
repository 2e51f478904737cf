"""Which framework a step is written in, told without running it.

A step of torch names or holds tensors, modules or optimizers; one of JAX does not. Nothing is
imported for a look: a bridge is loaded when an object of its framework is met.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from isoshard.core.kit import Framework, framework_of, framework_owning, require


def framework_of_step(
    step: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Framework | None:
    """Find the framework that a step is written in; nothing runs, and none is loaded needlessly.

    It is that of the first array, module or optimizer among its arguments, behind its method or
    closure, or among the globals that its code names.

    Returns:
        The framework; None: JAX.

    Example:
        >>> framework_of_step(lambda x: x + 1, (np.zeros(3),)) is None
        True
    """
    hint: str | None = None
    for one in (*_held((*args, kwargs or {})), *_behind(step)):
        if isinstance(one, types.ModuleType):
            root = one.__name__.partition(".")[0]
            hint = root if root in _EAGER else hint
            continue
        framework = framework_of(one) or framework_owning(one)
        if framework is not None:
            return framework
    return None if hint is None else require(hint)


def _held(value: Any) -> Iterator[Any]:
    """What plain containers hold, at any depth; a module that is a pytree stays itself."""
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _held(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _held(one)
    else:
        yield value


_EAGER = ("torch",)
"""Of a function that calls these packages by name, and holds nothing else, it is known whose it
is."""


_DEPTH = 4


_MOST = 10_000


def _behind(step: Any) -> Iterator[Any]:
    """The objects that a step consists of and holds, itself first, nearest first."""
    pending: collections.deque[tuple[Any, int]] = collections.deque([(step, 0)])
    visited: set[int] = set()
    while pending and len(visited) < _MOST:
        one, depth = pending.popleft()
        if id(one) in visited or isinstance(one, _ATOMS):
            continue
        visited.add(id(one))
        yield one
        if depth < _DEPTH and not isinstance(one, type | types.ModuleType):
            pending += [(inner, depth + 1) for inner in _inside(one)]


_ATOMS = (str, bytes, int, float, complex, bool, type(None), np.ndarray, jax.Array)


def _inside(one: Any) -> Iterator[Any]:
    if isinstance(one, types.FunctionType):
        for cell in one.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                yield cell.cell_contents
        yield from one.__defaults__ or ()
        names = _names(one.__code__)
        yield from (one.__globals__[name] for name in names if name in one.__globals__)
    elif isinstance(one, functools.partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, Mapping):
        yield from list(one.values())
    elif isinstance(one, list | tuple | set | frozenset):
        yield from list(one)
    for name in ("__self__", "__func__", "__wrapped__"):
        held = getattr(one, name, None)
        if held is not None and not isinstance(held, type | types.ModuleType):
            yield held
    if not isinstance(one, types.FunctionType | types.MethodType):
        yield from list(getattr(one, "__dict__", {}).values())


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
