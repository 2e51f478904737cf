"""Which objects the object walk looks into, and what it does with the types it does not.

Instances of user-defined classes, and of torch's modules, optimizers and distributions, are walked
by their attributes. Other objects of Python's library, torch, JAX and this package have no values
that user code changes, or are opaque: `OPAQUE_TYPES` lists what is behind such an object.

>>> import argparse, logging
>>> is_user_type(argparse.Namespace), is_user_type(logging.Logger), is_user_type(torch.nn.Linear)
(True, False, True)
>>> bound = functools.partial(max, 1)
>>> [source] = OPAQUE_TYPES[functools.partial](bound, "bound", ())
>>> source.name(1), source.read()[1]
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

from .guard_sources import CallResult, Fields, Source


def item_name(path: str, key: Any) -> str:
    """The expression of an item; of a parameter table of a module, whose path ends in a dot."""
    if path.endswith("."):
        return f"{path}{key}"
    return f"{path}[{key!r}]" if isinstance(key, str | int | float) else f"{path}[..]"


def element_name(obj: tuple[Any, ...], path: str, index: int) -> str:
    """The expression of an element of a tuple."""
    fields = getattr(obj, "_fields", None)
    return f"{path}[{index}]" if fields is None else f"{path}.{fields[index]}"


def attribute_name(obj: Any, path: str, key: str) -> str:
    """The expression of an attribute, or the prefix of its items."""
    return f"{path}." if isinstance(obj, torch.nn.Module) and key in _TABLES else f"{path}.{key}"


def is_user_module(name: str) -> bool:
    """Whether a module is user code: not Python's, torch's, JAX's or ours."""
    return name.partition(".")[0] not in _OPAQUE_PACKAGES


def is_user_type(cls: type) -> bool:
    """Whether a class is user-defined, or one of torch's whose instances have values of users."""
    module = cls.__module__ or ""
    if module.startswith("torch."):
        return module.startswith(
            ("torch.nn.", "torch.optim.", "torch.amp.", "torch.distributions.")
        )
    if module == "builtins":  # also of classes that `exec` makes without a module name
        return not cls.__flags__ & IMMUTABLE
    return module in USER_STDLIB or is_user_module(module)


def is_defined_by_torch(function: Any) -> bool:
    """Whether torch defines a function, a property or a method of a class."""
    inner = getattr(function, "__func__", None) or getattr(function, "fget", None) or function
    return (getattr(inner, "__module__", None) or "").startswith("torch.")


def is_user_attribute(key: str) -> bool:
    """Whether an attribute is not internal to torch or to us."""
    return key not in INTERNAL_ATTRIBUTES


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
INTERNAL_ATTRIBUTES = frozenset({"_per_optimizer_states", "_isoshard_compiled", "_stack"})
"""Attributes of torch's scalers, of compiled steps and of scanned layers."""
IMPLICIT_NAMES = frozenset(
    f"__{name}__"
    for name in (
        *("call", "getattr", "getattribute", "getitem", "setitem", "contains", "iter", "next"),
        *("len", "bool", "enter", "exit", "get", "set", "init", "post_init", "new", "index"),
        *("float", "int", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv"),
        *("matmul", "rmatmul", "neg", "pow", "eq", "lt", "le", "gt", "ge", "torch_function"),
    )
) | {"forward", "backward", "setup_context"}
_OPAQUE_PACKAGES = frozenset(
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
"""Packages whose objects have no values of users, or are opaque types."""
IMMUTABLE = 1 << 8
"""Of a type's flags: `Py_TPFLAGS_IMMUTABLETYPE`, whose attributes cannot be set."""
USER_STDLIB = frozenset({"types", "argparse", "collections"})
CONSTANT_TYPES = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), type(...), range, slice),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
        *(np.dtype, types.BuiltinFunctionType, types.CodeType, types.GetSetDescriptorType),
        *(types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType),
        *(np.float32, np.float64, np.int32, np.int64, np.bool_),
    }
)


_Contents = Iterator[Source | tuple[Any, str]]
"""Sources of values, and objects to walk, with their expressions."""


def _method(method: Any, path: str, names: Container[str]) -> _Contents:
    yield method.__self__, path.rpartition(".")[0] or "self"
    yield method.__func__, path


def _partial(partial: Any, path: str, names: Container[str]) -> _Contents:
    yield Fields(partial, ("func", "args", "keywords"), f"{path}.")


def _wrapped(wrapper: Any, path: str, names: Container[str]) -> _Contents:
    for name in ("__wrapped__", "__func__", "func"):
        yield getattr(wrapper, name, None), path


def _property(obj: Any, path: str, names: Container[str]) -> _Contents:
    yield obj.fget, path


def _called(obj: Any, path: str, names: Container[str]) -> _Contents:
    call = obj.get if isinstance(obj, contextvars.ContextVar) else obj
    yield CallResult(call, path)


def _thread_local(obj: Any, path: str, names: Container[str]) -> _Contents:
    yield Fields(obj, [key for key in vars(obj) if key in names], f"{path}.")


def _proxy(obj: Any, path: str, names: Container[str]) -> _Contents:
    for mapping in gc.get_referents(obj):
        yield mapping, path


def _bytes(obj: Any, path: str, names: Container[str]) -> _Contents:
    yield CallResult(functools.partial(bytes, obj), path)


def _random_state(obj: Any, path: str, names: Container[str]) -> _Contents:
    yield CallResult(obj.getstate, f"the state of {path}")


def _generator_seed(obj: Any, path: str, names: Container[str]) -> _Contents:
    """Drawing from it on the CPU inside a step raises."""
    yield CallResult(obj.initial_seed, f"the seed of {path}")


def _numpy_state(obj: Any, path: str, names: Container[str]) -> _Contents:
    bits = getattr(obj, "bit_generator", None)
    call = (lambda: str(bits.state)) if bits is not None else (lambda: str(obj.get_state()))
    yield CallResult(call, f"the state of {path}")


def _nothing(obj: Any, path: str, names: Container[str]) -> _Contents:
    """`os.environ` is guarded by the variables that were read."""
    return iter(())


OPAQUE_TYPES: dict[type, Callable[[Any, str, Container[str]], _Contents]] = {
    types.MethodType: _method,
    functools.partial: _partial,
    type(functools.lru_cache(len)): _wrapped,
    staticmethod: _wrapped,
    classmethod: _wrapped,
    functools.cached_property: _wrapped,
    property: _property,
    weakref.ref: _called,
    contextvars.ContextVar: _called,
    threading.local: _thread_local,
    type(os.environ): _nothing,
    types.MappingProxyType: _proxy,
    array.array: _bytes,
    bytearray: _bytes,
    memoryview: _bytes,
    random.Random: _random_state,
    torch.Generator: _generator_seed,
    np.random.Generator: _numpy_state,
    np.random.RandomState: _numpy_state,
}
"""Exact type -> the contents of an object: `(object, its expression, names that the code uses)`."""
