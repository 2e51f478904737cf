"""The walk over all objects that a step can reach, and the sources of their values.

From a function the walk goes to its closure, its defaults and the globals that its code names; from
an object to its attributes, from a container to its items; at any depth. There are three kinds.
`ObjectWalk()` follows, without running anything, every attribute and the code of each method whose
name other code mentions. `ObjectWalk(runs=True)` belongs to a step that runs: it follows every
attribute, and code when its first frame begins (`enter_code`), before it can change what it
reaches. After the run the code is known, and `ObjectWalk(executed)` follows only what that code
names.

>>> options = types.SimpleNamespace(beta=0.5, unused=1)
>>> def step():
...     return options.beta
>>> with ExecutedCode() as executed:
...     _ = step()
>>> walk = ObjectWalk(executed)
>>> walk.walk_globals(executed.codes)
>>> [source.name(0) for source in walk.sources if 0.5 in source.read()]
['options.beta']
"""

from __future__ import annotations

import collections
import enum
import functools
import inspect
import sys
import types
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch

from isoshard.torch_bridge._torch_internals.tensor_fields import all_hooks
from isoshard.torch_bridge.engine.recording.tensor_changes import namespace

from .executed_code import Codes, ExecutedCode, code_names, is_from_dynamo, is_internal, is_of_torch
from .guard_sources import (
    MISSING,
    ArrayBytes,
    Cell,
    Elements,
    Fields,
    InstanceTypes,
    Items,
    Members,
    Names,
    Namespaces,
    Source,
)
from .opaque_types import (
    BUILTINS,
    CONSTANT_TYPES,
    DESCRIPTORS,
    FUNCTION_FIELDS,
    FUNCTIONS,
    IMMUTABLE,
    IMPLICIT_NAMES,
    OPAQUE_TYPES,
    TENSOR_FIELDS,
    USER_STDLIB,
    attribute_name,
    element_name,
    is_defined_by_torch,
    is_user_attribute,
    is_user_module,
    is_user_type,
    item_name,
)

MAX_OBJECTS = 200_000
"""Objects after which a walk ends."""
DYNAMIC_NAME_DEPTH = 3
"""Levels of attributes that code with computed names is assumed to read of an object."""
LARGEST_ARRAY = 1 << 24
"""Bytes of the largest NumPy array whose elements are guarded."""


class ObjectWalk:
    """The objects that a step can reach.

    Args:
        executed: the code that ran, if it ran: only what this code names is followed.
        runs: whether `enter_code` will be called for all code before it runs.

    Attributes:
        sources: the sources of their values, in the order of the walk.
        modules: every module, once.
        optimizers: every optimizer, once.
        scalers: every gradient scaler, once.
        tensors: every tensor, by id, with its first expression.
        unguardable: expressions of what no guard can compare: iterators, very large NumPy arrays.
    """

    def __init__(self, executed: ExecutedCode | None = None, *, runs: bool = False):
        """See the class."""
        self._runs = runs
        self._entered: set[int] = set()
        self._globals: dict[int, set[str]] = collections.defaultdict(set)
        self._not_entered: dict[int, list[tuple[Any, str]]] = collections.defaultdict(list)
        self._user_modules: list[tuple[Mapping[str, Any], str]] = []
        self.sources: list[Source] = []
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scalers: list[torch.amp.GradScaler] = []
        self.tensors: dict[int, tuple[torch.Tensor, str]] = {}
        self.unguardable: list[str] = []
        self._executed = executed
        self._module_attributes: dict[int, set[str]] = collections.defaultdict(set)
        for code, scope in () if executed is None else executed.codes.values():
            for name, attribute in code_names(code).module_attributes:
                self._module_attributes[id(scope.get(name))].add(attribute)
        self._names = {*IMPLICIT_NAMES, *(executed.names if executed is not None else ())}
        # Sources refer to these two, which must not refer to the walk.
        self._is_watched = functools.partial(_is_watched, self._names)
        self._is_watched_on_tensor = functools.partial(
            _is_watched_on_tensor, None if executed is None else self._names
        )
        self._types: InstanceTypes | None = None
        self._namespaces: Namespaces | None = None
        self._unnamed: dict[str, list[tuple[Any, str]]] = collections.defaultdict(list)
        self._seen: dict[int, Any] = {}
        self._codes: set[tuple[int, int]] = set()
        self._pending: collections.deque[tuple[Any, str, int]] = collections.deque()

    def walk(self, obj: Any, path: str) -> None:
        """Walk from an object, whose expression is `path`."""
        self._push(obj, path)
        self._drain()

    def walk_globals(self, codes: Codes) -> None:
        """Walk from the globals that code which ran has named."""
        scopes: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for code, scope in codes.values():
            used = code_names(code)
            _, names = scopes.setdefault(id(scope), (scope, set()))
            names |= used.globals
            self._walk_imports(used.imports, scope)
        for scope, names in scopes.values():
            self._add_globals(scope, names)
        if self._executed is not None:
            attributes = vars(torch.Tensor)
            keys = [key for key in self._executed.names if hasattr(torch.Tensor, key)]
            self.sources.append(Names(attributes, keys, "torch.Tensor.", owner=torch.Tensor))
        self._drain()

    def enter_step(self, step: Any) -> None:
        """Walk from the code of a step before it runs."""
        step = step.forward if isinstance(step, torch.nn.Module) else step
        function = inspect.unwrap(getattr(step, "__func__", step))
        if type(function) is types.FunctionType and not is_internal(function.__code__):
            self.enter_code(function.__code__, function.__globals__)

    def enter_code(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        """Walk from a code object before its first run, with its globals."""
        if id(code) in self._entered:
            return
        self._types = self._namespaces = None
        if is_from_dynamo(code):
            self._walk_unrun(code)
        self._entered.add(id(code))
        used = code_names(code)
        self._walk_imports(used.imports, namespace)
        self._add_globals(namespace, used.globals)
        for function, path in self._not_entered.pop(id(code), ()):
            self._visit_run(function, path)
        new = used.names - self._names
        self._names |= new
        for attributes, path in self._user_modules:
            self._add_attributes(attributes, path, new)
        self._drain()

    def _walk_unrun(self, code: types.CodeType) -> None:
        """Follow the code that dynamo compiled to this code: it never runs, nor what it calls."""
        self._runs = False
        functions = list(chain.from_iterable(self._not_entered.values()))
        self._not_entered.clear()
        for function, path in functions:
            original = function.__code__
            same = original.co_filename == code.co_filename
            if same and original.co_firstlineno == code.co_firstlineno:
                self._visit_function(function, path)
            elif function.__name__ in self._names:
                self._pending.append((function, path, 0))
            else:
                self._unnamed[function.__name__].append((function, path))

    def _walk_imports(
        self, imports: Iterable[tuple[int, str]], namespace: Mapping[str, Any]
    ) -> None:
        for level, name in imports:
            package = (namespace.get("__package__") or "").split(".")
            base = package[: len(package) - level + 1] if level else []
            full = ".".join([*base, name] if name else base)
            for path in (full, full.partition(".")[0]):
                self._push(sys.modules.get(path), path)

    def _add_globals(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        present = [name for name in sorted(names) if name in namespace]
        watched = self._globals[id(namespace)]
        names = [name for name in names if name not in watched]
        watched.update(names)
        absent = frozenset(name for name in names if name not in namespace)
        self._add(Names(namespace, present, "", watches=absent.__contains__, absent=tuple(absent)))
        if self._executed is not None:
            hidden = sorted(name for name in absent if name in BUILTINS)
            self.sources.append(Names(BUILTINS, hidden, "builtins."))

    def _add_attributes(
        self, attributes: Mapping[str, Any], path: str, names: Container[str]
    ) -> None:
        """Add the attributes of a module that some code names."""
        keys = [
            key
            for key in attributes
            if key in names and key not in _MODULE_FIELDS and not key.startswith("__")
        ]
        if keys:
            self._add(Names(attributes, keys, f"{path}."))

    def leaves(self, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
        """Every tensor that may have a gradient of its own, and every parameter, once.

        Args:
            seen: ids of those returned before; updated.
        """
        seen = set() if seen is None else seen
        optimized = [
            p for o in self.optimizers for group in o.param_groups for p in group["params"]
        ]
        for tensor in (*(tensor for tensor, _ in self.tensors.values()), *optimized):
            is_leaf = isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad
            if id(tensor) not in seen and is_leaf and tensor.is_leaf:
                seen.add(id(tensor))
                yield tensor

    def _push(self, obj: Any, path: str, *, dynamic_depth: int = 0) -> None:
        if type(obj) in CONSTANT_TYPES or obj is MISSING:
            return
        if isinstance(obj, torch.Tensor):
            if id(obj) not in self.tensors:
                self.tensors[id(obj)] = (obj, path)
                self._visit_tensor(obj, path)
        elif id(obj) not in self._seen:
            if len(self._seen) == MAX_OBJECTS:
                self.unguardable.append(f"{path} and what was found after {MAX_OBJECTS} objects")
            if len(self._seen) > MAX_OBJECTS:
                return
            self._seen[id(obj)] = obj
            self._pending.append((obj, path, dynamic_depth))

    def _visit_tensor(self, tensor: torch.Tensor, path: str) -> None:
        """Attributes that user code set on a tensor, and its hooks."""
        attributes = namespace(tensor)
        keys = [key for key in attributes if self._is_watched_on_tensor(key)]
        self._add(Names(attributes, keys, f"{path}.", watches=self._is_watched_on_tensor))
        for hooks in all_hooks(tensor):
            if hooks:
                self._push(hooks, f"the hooks of {path}")

    def _drain(self) -> None:
        while self._pending:
            self._visit(*self._pending.popleft())

    def _add(self, source: Source) -> None:
        """Add a source, and follow its values."""
        self.sources.append(source)
        for index, value in enumerate(source.read()):
            if type(value) not in CONSTANT_TYPES:
                self._push(value, source.name(index))

    def _visit(self, obj: Any, path: str, dynamic_depth: int) -> None:
        cls = type(obj)
        if isinstance(obj, dict):
            if "__spec__" not in obj:  # the globals of a module
                self.sources.append(Items(obj, path))
                for key, value in list(dict.items(obj)):
                    self._push(key, f"a key of {path}")
                    self._push(value, item_name(path, key))
        elif isinstance(obj, list | collections.deque):
            self._add(Elements(obj, path))
        elif isinstance(obj, tuple):
            for index, value in enumerate(obj):
                self._push(value, element_name(obj, path, index))
        elif isinstance(obj, set):
            self._add(Members(obj, path))
        elif isinstance(obj, frozenset):
            for value in obj:
                self._push(value, path)
        elif cls is types.FunctionType:
            self._visit_function(obj, path)
        elif isinstance(obj, types.ModuleType):  # transformers has a class of its own for it
            self._visit_module(obj, path)
            if cls is not types.ModuleType:
                self._push(cls, cls.__qualname__)
            return
        elif cls in OPAQUE_TYPES:
            for content in OPAQUE_TYPES[cls](obj, path, self._names):
                self._add(content) if isinstance(content, Source) else self._push(*content)
        elif isinstance(obj, type):
            self._visit_class(obj, path)
        elif isinstance(obj, np.ndarray):
            if obj.nbytes > LARGEST_ARRAY:
                self.unguardable.append(f"{path}, a NumPy array of {obj.nbytes} bytes")
            else:
                self._add(ArrayBytes(obj, path))
        if not isinstance(obj, type) and cls not in OPAQUE_TYPES and cls not in _NO_INSTANCES:
            self._visit_object(obj, path, dynamic_depth)

    def _visit_module(self, module: types.ModuleType, path: str) -> None:
        """A Python module; of torch, JAX and the like only the functions that code names."""
        attributes = vars(module)
        if is_user_module(module.__name__):
            self._user_modules.append((attributes, path))
            self._add_attributes(attributes, path, self._names)
        elif self._executed is not None:
            names = self._names
            keys = [key for key in attributes if key in names and _is_function(attributes[key])]
            absent = frozenset(
                key for key in self._module_attributes[id(module)] if key not in attributes
            )
            watched = {"watches": absent.__contains__, "absent": tuple(absent)}
            self._add(Names(attributes, keys, f"{path}.", **watched))

    def _visit_object(self, obj: Any, path: str, dynamic_depth: int) -> None:
        """An instance of a class, which may be a subclass of a container."""
        cls = type(obj)
        if isinstance(obj, torch.nn.Module):
            self.modules.append(obj)
        elif isinstance(obj, torch.optim.Optimizer):
            self.optimizers.append(obj)
        elif isinstance(obj, torch.amp.GradScaler):
            self.scalers.append(obj)
        elif not is_user_type(cls):
            if cls.__module__.startswith("isoshard."):
                self._push(vars(obj).get("__wrapped__") if hasattr(obj, "__dict__") else None, path)
            if hasattr(cls, "__next__"):
                self.unguardable.append(f"{path}, a {cls.__name__}, may be advanced by it")
            return
        if not cls.__flags__ & IMMUTABLE:
            if self._types is None:
                self._types = InstanceTypes([], "")
                self.sources.append(self._types)
            self._types.base.append(obj)
        attributes = getattr(obj, "__dict__", None)
        executed = self._executed
        if executed is not None and id(obj) in executed.dynamic_objects:
            dynamic_depth = DYNAMIC_NAME_DEPTH
        all_names = executed is None or dynamic_depth > 0 or cls.__module__ in USER_STDLIB
        if type(attributes) is dict and (attributes or cls is not collections.OrderedDict):
            watches = is_user_attribute if all_names else self._is_watched
            keys = [key for key in attributes if watches(key)]
            if self._namespaces is None:
                self._namespaces = Namespaces([], "")
                self.sources.append(self._namespaces)
            self._namespaces.base.append(obj)
            self.sources.append(Names(attributes, keys, f"{path}.", watches=watches))
            for key in keys:
                self._push(
                    attributes[key], attribute_name(obj, path, key), dynamic_depth=dynamic_depth - 1
                )
        for base in cls.__mro__:
            if "__slots__" in vars(base):
                slots = [
                    name
                    for name, value in vars(base).items()
                    if isinstance(value, types.MemberDescriptorType)
                    and (all_names or name in self._names)
                ]
                self._add(Fields(obj, slots, f"{path}."))
        self._push(cls, cls.__qualname__)

    def _visit_class(self, cls: type, path: str) -> None:
        for base in cls.__mro__:
            immutable = base.__flags__ & IMMUTABLE
            if immutable or not is_user_type(base) or issubclass(base, enum.Enum):
                continue
            self._push(base, base.__qualname__)
            if base is not cls:
                continue
            attributes = vars(base)
            if self._executed is not None:
                keys = [key for key in attributes if self._is_read(key, attributes[key])]
                is_named = self._names.__contains__
                self._add(Names(attributes, keys, f"{path}.", owner=base, watches=is_named))
                continue
            values = []
            for key, value in list(attributes.items()):
                if isinstance(value, FUNCTIONS):
                    if self._runs or key in self._names:
                        self._push(value, f"{path}.{key}")
                    else:
                        self._unnamed[key].append((value, f"{path}.{key}"))
                elif not key.startswith("__") and not isinstance(value, DESCRIPTORS):
                    values.append(key)
            is_new = functools.partial(_is_added, frozenset(attributes))
            self._add(Names(attributes, values, f"{path}.", owner=base, watches=is_new))

    def _is_read(self, key: str, value: Any) -> bool:
        """Whether a value of a class was read; torch only calls its own functions."""
        if key in self._names and not (isinstance(value, FUNCTIONS) and is_defined_by_torch(value)):
            return True
        return self._has_run(value)

    def _has_run(self, value: Any) -> bool:
        """Whether a value of a class is a function that ran."""
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        return self._executed is not None and id(code) in self._executed.ids

    def _visit_function(self, function: Any, path: str) -> None:
        code = function.__code__
        is_internal_code = is_internal(code)
        if self._executed is not None and id(code) not in self._executed.ids:
            if not is_internal_code and not is_defined_by_torch(function):
                self._visit_unrun(function, path)
            return
        if vars(function) and (self._executed is None or not is_defined_by_torch(function)):
            self._push(vars(function), f"{path}.__dict__")
        if self._runs and not is_internal_code and id(code) not in self._entered:
            self._not_entered[id(code)].append((function, path))
            return
        self._visit_run(function, path)
        if self._executed is None and not self._runs and not is_internal_code:
            self._visit_code(code, function.__globals__)

    def _visit_unrun(self, function: Any, path: str) -> None:
        """A function that did not run, whose fields user code can read."""
        self.sources.append(Fields(function, FUNCTION_FIELDS, f"{path}."))
        self._push(function.__defaults__, f"{path}.__defaults__")
        self._push(function.__kwdefaults__, f"{path}.__kwdefaults__")
        if vars(function):
            self._push(vars(function), f"{path}.__dict__")

    def _visit_run(self, function: Any, path: str) -> None:
        """What a function uses when it runs besides globals: its code, defaults and closure."""
        is_fixed = is_of_torch(function.__code__)
        if not is_fixed:
            self.sources.append(Fields(function, FUNCTION_FIELDS, f"{path}."))
        self._push(function.__defaults__, f"{path}.__defaults__")
        self._push(function.__kwdefaults__, f"{path}.__kwdefaults__")
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                source = Cell(cell, name)
                if is_fixed:
                    self._push(source.read()[0], name)
                else:
                    self._add(source)

    def _visit_code(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        if (id(code), id(namespace)) in self._codes:
            return
        self._codes.add((id(code), id(namespace)))
        used = code_names(code)
        self._add_globals(namespace, used.globals)
        for name in used.names - self._names:
            self._names.add(name)
            for obj, path in self._unnamed.pop(name, ()):
                self._seen[id(obj)] = obj
                self._pending.append((obj, path, 0))
        for nested in used.nested:
            self._visit_code(nested, namespace)


def _is_watched(names: Container[str], key: str) -> bool:
    """Whether an attribute is a user's, and named by code."""
    return key in names and is_user_attribute(key)


def _is_watched_on_tensor(names: Container[str] | None, key: str) -> bool:
    """Whether an attribute of a tensor is a user's, and named by code; `None` is any name."""
    return key not in TENSOR_FIELDS and (names is None or key in names)


def _is_added(existing: Container[str], key: str) -> bool:
    """Whether user code added an attribute to a class."""
    return key not in existing and not key.startswith("__")


def _is_function(value: Any) -> bool:
    """Whether an attribute of torch, JAX or Python is a function, a class, or a module."""
    return callable(value) or isinstance(value, types.ModuleType)


def modules_of(function: Any) -> list[torch.nn.Module]:
    """Every `nn.Module` that a function can reach, once."""
    walk = ObjectWalk()
    walk.walk(function, getattr(function, "__name__", "function"))
    return walk.modules


_MODULE_FIELDS = frozenset(vars(torch.nn.Module()))
"""In code these are fields of an `nn.Module`, though a Python module may have a global of that
name: `transformers._modules` is a set of 2,253 names, which would be compared in each call."""
_NO_INSTANCES = (types.FunctionType, types.ModuleType)
