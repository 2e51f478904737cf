"""Whether two function objects compute the same: equal code that closes over equal values.

A function that is defined inside a training step is a new object in every step. A trace of it can
be used again if its code and the values that it closes over are the same.

>>> def make(factor):
...     return lambda x: factor * x
>>> identity(make(2)) == identity(make(2))
True
>>> identity(make(2)) == identity(make(3))
False

Only plain values are compared: numbers, strings, types, modules, functions (of JAX as well), and
tuples of them. A function that closes over anything else (an array, an object) equals only itself.
Methods of one object are equal, as for `jax.jit`.
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
    """A hashable key that is equal for functions that compute the same.

    Raises:
        TypeError: it cannot be hashed.
    """
    key = _key_of(function, _DEPTH)
    if key is None:
        hash(function)
        return function
    return key


def _key_of(obj: Any, depth: int) -> Any:
    """The key of a value; None if it equals only itself."""
    if type(obj) in _PLAIN:
        return (type(obj), repr(obj) if isinstance(obj, float) else obj)
    if isinstance(obj, _NAMED):
        return (types.MethodType, obj)
    if depth == 0:  # perhaps functions that close over each other
        return None
    if type(obj) is tuple:
        return _keys_of(obj, depth)
    if type(obj) is functools.partial:
        keywords = obj.keywords
        return _keys_of((obj.func, *obj.args, tuple(keywords), *keywords.values()), depth)
    if type(obj) is types.FunctionType:
        return _key_of_function(obj, depth)
    return None


def _key_of_function(function: types.FunctionType, depth: int) -> Any:
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable that has no value yet
        return None
    keywords = function.__kwdefaults__ or {}
    defaults = function.__defaults__ or ()
    contents = _keys_of((*cells, *defaults, *keywords.values()), depth)
    if contents is None:
        return None
    return (function.__code__, id(function.__globals__), len(defaults), tuple(keywords), contents)


def _keys_of(objects: tuple[Any, ...], depth: int) -> Any:
    keys = tuple([_key_of(obj, depth - 1) for obj in objects])
    return None if None in keys else keys
