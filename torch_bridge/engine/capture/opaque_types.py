"""Which objects the object walk looks into, and what it does with the types it does not.

Instances of user-defined classes, and of torch's modules, optimizers and distributions, are walked
by their attributes. Other objects of Python's library, torch, JAX and this package have no values
that user code changes, or are opaque: `CLOSED` lists what is behind such an object.

>>> import argparse, logging
>>> is_open_kind(argparse.Namespace), is_open_kind(logging.Logger), is_open_kind(torch.nn.Linear)
(True, False, True)
>>> bound = functools.partial(max, 1)
>>> [holder] = CLOSED[functools.partial](bound, "bound", ())
>>> holder.name(1), holder.read()[1]
('bound.args', (1,))
"""

from __future__ import annotations

import array
import builtins
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

from .guard_sources import Asked, Fields, Holder


def item_name(path: str, key: Any) -> str:
    """How a program would write an item; a table of a module's has a path that ends in a dot."""
    if path.endswith("."):
        return f"{path}{key}"
    return f"{path}[{key!r}]" if isinstance(key, str | int | float) else f"{path}[..]"


def element_name(thing: tuple[Any, ...], path: str, number: int) -> str:
    """How a program would write an element of a tuple."""
    fields = getattr(thing, "_fields", None)
    return f"{path}[{number}]" if fields is None else f"{path}.{fields[number]}"


def attribute_name(thing: Any, path: str, key: str) -> str:
    """How a program would write an attribute, or what stands before its items."""
    return f"{path}." if isinstance(thing, torch.nn.Module) and key in _TABLES else f"{path}.{key}"


def is_open_module(name: str) -> bool:
    """Whether a module's attributes are a program's own: not Python's, torch's, JAX's or ours."""
    return name.partition(".")[0] not in _CLOSED


def is_open_kind(kind: type) -> bool:
    """Whether instances of a class hold a program's own values."""
    module = kind.__module__ or ""
    if module.startswith("torch."):
        return module.startswith(
            ("torch.nn.", "torch.optim.", "torch.amp.", "torch.distributions.")
        )
    if module == "builtins":  # or made by `exec` of a program without a name
        return not kind.__flags__ & IMMUTABLE
    return module in OPEN_STDLIB or is_open_module(module)


def is_torchs(function: Any) -> bool:
    """Whether torch defines a function, a property or a method of a class."""
    inside = getattr(function, "__func__", None) or getattr(function, "fget", None) or function
    return (getattr(inside, "__module__", None) or "").startswith("torch.")


def counts(key: str) -> bool:
    """Whether an attribute is a program's, and not torch's or our bookkeeping."""
    return key not in BOOKKEEPING


FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
DESCRIPTORS = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.BuiltinFunctionType,
)
FUNCTION_FIELDS = ("__code__", "__defaults__", "__kwdefaults__")
_TABLES = frozenset({"_modules", "_parameters", "_buffers"})
TENSOR_FIELDS = ("_storage", "_chain", "_aval")
BUILTINS = vars(builtins)
BOOKKEEPING = frozenset({"_per_optimizer_states", "_isoshard_compiled", "_stack"})
"""Attributes that torch's scalers, compiled steps and scanned layers keep for themselves."""
ALWAYS = frozenset(
    f"__{name}__"
    for name in (
        *("call", "getattr", "getattribute", "getitem", "setitem", "contains", "iter", "next"),
        *("len", "bool", "enter", "exit", "get", "set", "init", "post_init", "new", "index"),
        *("float", "int", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv"),
        *("matmul", "rmatmul", "neg", "pow", "eq", "lt", "le", "gt", "ge", "torch_function"),
    )
) | {"forward", "backward", "setup_context"}
_CLOSED = frozenset(
    {
        *("builtins", "torch", "jax", "jaxlib", "numpy", "isoshard", "logging", "threading"),
        *("_thread", "re", "io", "_io", "pathlib", "weakref", "concurrent", "asyncio", "ast"),
        *("multiprocessing", "contextvars", "contextlib", "functools", "collections", "typing"),
        *("abc", "_abc", "enum", "inspect", "dis", "os", "posix", "sys", "time", "math", "random"),
        *("types", "warnings", "copy", "itertools", "operator", "dataclasses", "datetime"),
        *("subprocess", "queue", "socket", "ssl", "json", "pickle", "importlib", "pytest"),
        *("_pytest", "pluggy", "unittest", "hashlib", "uuid", "tempfile", "shutil", "string"),
    }
)
"""Packages whose objects hold no values of a program, or are followed in ways of their own."""
IMMUTABLE = 1 << 8
"""Of a type's flags: `Py_TPFLAGS_IMMUTABLETYPE`, whose attributes nobody can set."""
OPEN_STDLIB = frozenset({"types", "argparse", "collections"})
ATOMS = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), type(...), range, slice),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
        *(np.dtype, types.BuiltinFunctionType, types.CodeType, types.GetSetDescriptorType),
        *(types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType),
        *(np.float32, np.float64, np.int32, np.int64, np.bool_),
    }
)


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
