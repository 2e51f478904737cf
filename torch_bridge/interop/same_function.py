"""When two functions are the same one, written down again.

A function that is defined inside a training step is another object in every step. What was traced
from it can be used again if its code is the same, and what it holds from around it.

>>> def make(factor):
...     return lambda x: factor * x
>>> identity(make(2)) == identity(make(2))
True
>>> identity(make(2)) == identity(make(3))
False

Only plain things are compared: numbers, strings, types, modules, functions (of JAX as well), and
tuples of them. A function that holds anything else (an array, an object) is the same only as
itself. Methods of one object are the same, as for `jax.jit`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax

_DEPTH = 6
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType)
_NAMED = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.MethodType,
    jax.stages.Wrapped,
    jax.custom_jvp,
    jax.custom_vjp,
    jax.numpy.ufunc,
)


def identity(function: Callable[..., Any]) -> Any:
    """Something hashable that is equal for functions that do the same.

    Args:
        function: any callable that can be hashed.

    Raises:
        TypeError: it cannot be hashed.
    """
    found = _of(function, _DEPTH)
    if found is None:
        hash(function)
        return function
    return found


def _of(thing: Any, depth: int) -> Any:
    """What stands for one thing; None if only the thing itself does."""
    if type(thing) in _PLAIN:
        return (type(thing), repr(thing) if isinstance(thing, float) else thing)
    if isinstance(thing, _NAMED):
        return (types.MethodType, thing)
    if depth == 0:  # functions that hold each other, perhaps
        return None
    if type(thing) is tuple:
        return _all(thing, depth)
    if type(thing) is functools.partial:
        keywords = thing.keywords
        return _all((thing.func, *thing.args, tuple(keywords), *keywords.values()), depth)
    if type(thing) is types.FunctionType:
        return _of_function(thing, depth)
    return None


def _of_function(function: types.FunctionType, depth: int) -> Any:
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable that has no value yet
        return None
    keywords = function.__kwdefaults__ or {}
    defaults = function.__defaults__ or ()
    held = _all((*cells, *defaults, *keywords.values()), depth)
    if held is None:
        return None
    return (function.__code__, id(function.__globals__), len(defaults), tuple(keywords), held)


def _all(things: tuple[Any, ...], depth: int) -> Any:
    found = tuple([_of(thing, depth - 1) for thing in things])
    return None if None in found else found
