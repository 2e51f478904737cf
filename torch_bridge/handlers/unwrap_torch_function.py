"""Functions that torch composes of others in Python, with the handlers of those others in force.

`torch.nn.functional.relu` begins with a check for `__torch_function__`, and is then called anew
with all of that switched off, so a handler for a function inside it would not be called. Here it
runs as if nothing overrode it, and the functions that it calls are checked again.

>>> from torch.overrides import handle_torch_function, has_torch_function
>>> def double(x):                                        # as torch.overrides asks for
...     if has_torch_function((x,)):
...         return handle_torch_function(double, (x,), x)
...     return torch.add(x, x)
>>> without_override_check(double)(torch.ones(1))
tensor([2.])
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from isoshard.core.runtime.caches import cached
from isoshard.torch_bridge._torch_internals.undocumented import DisableTorchFunctionSubclass

_CHECKS = (
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
)


class _UnwrappedGlobals(dict):
    """Globals in which nothing is overridden, and everything else is as it is now."""

    def __init__(self, live: dict[str, Any]) -> None:
        super().__init__(
            dict.fromkeys(_CHECKS, _has_no_override), __builtins__=live["__builtins__"]
        )
        self._live = live

    def __missing__(self, name: str) -> Any:
        return self._live[name]


def _has_no_override(*_: Any) -> bool:
    return False


@cached(1024)
def without_override_check(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function below its check for overrides.

    Args:
        function: as `__torch_function__` gets it.

    Returns:
        For a Python function that checks by a global name of `torch.overrides`, one that does not
        check and whose calls are checked again. For any other, the function itself with overrides
        switched off.
    """
    if isinstance(function, types.FunctionType) and _checks_overrides(function):
        rebuilt = types.FunctionType(
            function.__code__,
            _UnwrappedGlobals(function.__globals__),
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        rebuilt.__kwdefaults__ = function.__kwdefaults__
        return functools.partial(_call_unwrapped, function, rebuilt)
    return functools.partial(_call_plain, function)


class _Unwrapping(threading.local):
    def __init__(self) -> None:
        self.running: set[Any] = set()


_THREAD = _Unwrapping()


def _call_unwrapped(function: Any, rebuilt: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Unwrap a function, but not again inside it: some methods call C++ under their own name."""
    if function in _THREAD.running:
        return _call_plain(function, *args, **kwargs)
    _THREAD.running.add(function)
    try:
        return rebuilt(*args, **kwargs)
    finally:
        _THREAD.running.discard(function)


def _call_plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def _checks_overrides(function: types.FunctionType) -> bool:
    names = [name for name in _CHECKS if name in function.__code__.co_names]
    global_names = function.__globals__
    return bool(names) and all(
        global_names.get(name) is getattr(torch.overrides, name) for name in names
    )
