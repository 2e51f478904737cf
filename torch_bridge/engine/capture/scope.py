"""What a search behind a step follows, and under which names: a program's own objects.

Objects of Python's library, of torch (but for modules, optimizers and the like), of JAX and of this
package hold no values that a program changes by itself, or are followed in ways of their own.

>>> import argparse, logging
>>> is_open_kind(argparse.Namespace), is_open_kind(logging.Logger), is_open_kind(torch.nn.Linear)
(True, False, True)
"""

from __future__ import annotations

import builtins
import functools
import types
from typing import Any

import numpy as np
import torch


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
