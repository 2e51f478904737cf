"""Deprecations: the old form of a public name, keyword or call works for one release, and warns.

Every warning names the new form, and is attributed to the line that uses the old one:

>>> import warnings
>>> @accepts_old(keyword("out_specs", "out_sharding"))
... def function(*, out_sharding=None):
...     return out_sharding
>>> with warnings.catch_warnings(record=True) as caught:
...     warnings.simplefilter("always")
...     function(out_specs="x")
'x'
>>> print(caught[0].message)
function(out_specs=..) is now function(out_sharding=..); the old form will be removed in the next minor release

| what changed | what serves the old form |
|---|---|
| the module of a name | `moved_attribute`, called by the `__getattr__` of the old module |
| a keyword | `accepts_old(keyword(old, new))` |
| the order of arguments | `accepts_old` with a function that recognizes the old order |
| the name of a module | `isoshard._renamed`, which calls `warn` |
"""  # noqa: E501

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class NewCall(NamedTuple):
    """A call in its new form, and how the old and the new one are written."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    old: str
    new: str


Translate = Callable[[str, tuple[Any, ...], dict[str, Any]], NewCall | None]
"""The new form of a call by a function's name and its arguments; None if it has that form."""


def warn(old: str, new: str, *, stacklevel: int = 1) -> None:
    """Warn that `old` is now `new`; `stacklevel` is that of `warnings.warn` for the caller."""
    message = f"{old} is now {new}; the old form will be removed in the next minor release"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel + 1)


def moved_attribute(module: str, name: str, new_module: str, new_name: str = "") -> Any:
    """An attribute of `new_module`, for the `__getattr__` of `module`, with a warning."""
    new_name = new_name or name
    warn(f"{module}.{name}", f"{new_module}.{new_name}", stacklevel=3)
    return getattr(importlib.import_module(new_module), new_name)


def accepts_old(translate: Translate) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorator: calls of an old form are made in the new one, with a warning."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        name = getattr(function, "__name__", "")

        @functools.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            call = translate(name, args, kwargs)
            if call is None:
                return function(*args, **kwargs)
            warn(call.old, call.new, stacklevel=2)
            new: Callable[..., _R] = function
            return new(*call.args, **call.kwargs)

        return wrapper

    return decorate


def keyword(old: str, new: str) -> Translate:
    """The translation of a keyword that has another name now."""

    def translate(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NewCall | None:
        if old not in kwargs:
            return None
        if new in kwargs:
            raise TypeError(f"{name}() got {new!r} and {old!r}, which is its old name")
        renamed = {new if key == old else key: value for key, value in kwargs.items()}
        return NewCall(args, renamed, f"{name}({old}=..)", f"{name}({new}=..)")

    return translate
