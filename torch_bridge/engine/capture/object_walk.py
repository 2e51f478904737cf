"""What a step can reach: the objects behind it, and where each keeps its values.

From a function the search goes to its closure, its defaults and the globals that its code names;
from an object to its attributes, from a container to its items; at any depth. It comes in three
kinds. `Reachable()` follows, without running anything, every attribute and the code of each method
whose name some other code mentions. `Reachable(runs=True)` belongs to a step that runs: it follows
every attribute, and code when that begins (`begin`), before it can change what it reaches. After
the run the code is known, and `Reachable(executed)` follows only what that code names.

>>> options = types.SimpleNamespace(beta=0.5, unused=1)
>>> def step():
...     return options.beta
>>> with Executed() as executed:
...     _ = step()
>>> found = Reachable(executed)
>>> found.follow_code(executed.codes)
>>> [holder.name(0) for holder in found.holders if 0.5 in holder.read()]
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

from .executed_code import Codes, Executed, described, is_dynamos, is_internal, is_of_torch
from .guard_sources import (
    MISSING,
    ArrayBytes,
    Cell,
    Elements,
    Fields,
    Holder,
    Items,
    Kinds,
    Members,
    Names,
    Namespaces,
)
from .opaque_types import (
    ALWAYS,
    ATOMS,
    BUILTINS,
    CLOSED,
    DESCRIPTORS,
    FUNCTION_FIELDS,
    FUNCTIONS,
    IMMUTABLE,
    OPEN_STDLIB,
    TENSOR_FIELDS,
    attribute_name,
    counts,
    element_name,
    is_open_kind,
    is_open_module,
    is_torchs,
    item_name,
)

LIMIT = 200_000
"""Objects after which a search goes no further."""
OPEN_LEVELS = 3
"""How far behind an object code that computes the names of attributes is taken to look."""
LARGEST_ARRAY = 1 << 24
"""Bytes of a NumPy array whose elements are still compared."""


class Reachable:
    """The objects behind a step.

    Args:
        executed: the code that ran, if it ran: only what this code names is followed.
        runs: whether `begin` will tell of code before it runs, which is followed then.

    Attributes:
        holders: where values are kept, in the order of finding.
        modules: every module, once.
        optimizers: every optimizer, once.
        scalers: every gradient scaler, once.
        tensors: every tensor, by id, with the name under which it was found first.
        unwatched: names of what may change without a trace: iterators, very large NumPy arrays.
    """

    def __init__(self, executed: Executed | None = None, *, runs: bool = False):
        """Nothing found yet."""
        self._runs = runs
        self._begun: set[int] = set()
        self._globals: dict[int, set[str]] = collections.defaultdict(set)
        self._functions: dict[int, list[tuple[Any, str]]] = collections.defaultdict(list)
        self._spaces: list[tuple[Mapping[str, Any], str]] = []
        self.holders: list[Holder] = []
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scalers: list[torch.amp.GradScaler] = []
        self.tensors: dict[int, tuple[torch.Tensor, str]] = {}
        self.unwatched: list[str] = []
        self._executed = executed
        self._asked: dict[int, set[str]] = collections.defaultdict(set)
        for code, space in () if executed is None else executed.codes.values():
            for name, attribute in described(code).asked:
                self._asked[id(space.get(name))].add(attribute)
        self._names = {*ALWAYS, *(executed.names if executed is not None else ())}
        # Holders keep these two: they must not keep all that is found.
        self._awaited = functools.partial(_is_awaited, self._names)
        self._given = functools.partial(_is_given, None if executed is None else self._names)
        self._kinds: Kinds | None = None
        self._namespaces: Namespaces | None = None
        self._waiting: dict[str, list[tuple[Any, str]]] = collections.defaultdict(list)
        self._seen: dict[int, Any] = {}
        self._codes: set[tuple[int, int]] = set()
        self._pending: collections.deque[tuple[Any, str, int]] = collections.deque()

    def follow(self, thing: Any, path: str) -> None:
        """Search from an object, which goes by a name."""
        self._push(thing, path)
        self._drain()

    def follow_code(self, codes: Codes) -> None:
        """Search from the globals that code which ran has named."""
        spaces: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for code, space in codes.values():
            seen = described(code)
            _, names = spaces.setdefault(id(space), (space, set()))
            names |= seen.globals
            self._follow_imports(seen.imports, space)
        for space, names in spaces.values():
            self._hold_globals(space, names)
        if self._executed is not None:
            own = vars(torch.Tensor)
            keys = [key for key in self._executed.names if hasattr(torch.Tensor, key)]
            self.holders.append(Names(own, keys, "torch.Tensor.", owner=torch.Tensor))
        self._drain()

    def begin_with(self, step: Any) -> None:
        """Search from the code of a step, which is to run."""
        step = step.forward if isinstance(step, torch.nn.Module) else step
        function = inspect.unwrap(getattr(step, "__func__", step))
        if type(function) is types.FunctionType and not is_internal(function.__code__):
            self.begin(function.__code__, function.__globals__)

    def begin(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        """Search from a code object, of which this is the first run.

        Args:
            code: which.
            namespace: its globals.
        """
        if id(code) in self._begun:
            return
        self._kinds = self._namespaces = None
        if is_dynamos(code):
            self._follow_unrun(code)
        self._begun.add(id(code))
        seen = described(code)
        self._follow_imports(seen.imports, namespace)
        self._hold_globals(namespace, seen.globals)
        for function, path in self._functions.pop(id(code), ()):
            self._visit_ran(function, path)
        new = seen.names - self._names
        self._names |= new
        for own, path in self._spaces:
            self._hold_attributes(own, path, new)
        self._drain()

    def _follow_unrun(self, code: types.CodeType) -> None:
        """Follow the code of which dynamo made this code: it never runs, nor what it calls."""
        self._runs = False
        functions = list(chain.from_iterable(self._functions.values()))
        self._functions.clear()
        for function, path in functions:
            original = function.__code__
            same = original.co_filename == code.co_filename
            if same and original.co_firstlineno == code.co_firstlineno:
                self._visit_function(function, path)
            elif function.__name__ in self._names:
                self._pending.append((function, path, 0))
            else:
                self._waiting[function.__name__].append((function, path))

    def _follow_imports(
        self, imports: Iterable[tuple[int, str]], namespace: Mapping[str, Any]
    ) -> None:
        for level, name in imports:
            package = (namespace.get("__package__") or "").split(".")
            base = package[: len(package) - level + 1] if level else []
            full = ".".join([*base, name] if name else base)
            for path in (full, full.partition(".")[0]):
                self._push(sys.modules.get(path), path)

    def _hold_globals(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        found = [name for name in sorted(names) if name in namespace]
        held = self._globals[id(namespace)]
        names = [name for name in names if name not in held]
        held.update(names)
        absent = frozenset(name for name in names if name not in namespace)
        self._hold(Names(namespace, found, "", awaited=absent.__contains__, absent=tuple(absent)))
        if self._executed is not None:
            hidden = sorted(name for name in absent if name in BUILTINS)
            self.holders.append(Names(BUILTINS, hidden, "builtins."))

    def _hold_attributes(self, own: Mapping[str, Any], path: str, names: Container[str]) -> None:
        """Those attributes of a module that some code names."""
        keys = [key for key in own if key in names and not key.startswith("__")]
        if keys:
            self._hold(Names(own, keys, f"{path}."))

    def leaves(self, known: set[int] | None = None) -> Iterator[torch.Tensor]:
        """Every tensor that may have a gradient of its own, and every parameter, once.

        Args:
            known: ids of those that were told before; of those told now are added.
        """
        known = set() if known is None else known
        given = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        for tensor in (*(tensor for tensor, _ in self.tensors.values()), *given):
            is_leaf = isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad
            if id(tensor) not in known and is_leaf and tensor.is_leaf:
                known.add(id(tensor))
                yield tensor

    def _push(self, thing: Any, path: str, *, open_levels: int = 0) -> None:
        if type(thing) in ATOMS or thing is MISSING:
            return
        if isinstance(thing, torch.Tensor):
            if id(thing) not in self.tensors:
                self.tensors[id(thing)] = (thing, path)
                self._visit_tensor(thing, path)
        elif id(thing) not in self._seen:
            if len(self._seen) == LIMIT:
                self.unwatched.append(f"{path} and what was found after {LIMIT} objects")
            if len(self._seen) > LIMIT:
                return
            self._seen[id(thing)] = thing
            self._pending.append((thing, path, open_levels))

    def _visit_tensor(self, tensor: torch.Tensor, path: str) -> None:
        """Attributes that a program gave a tensor, and its hooks."""
        own = namespace(tensor)
        keys = [key for key in own if self._given(key)]
        self._hold(Names(own, keys, f"{path}.", awaited=self._given))
        for hooks in all_hooks(tensor):
            if hooks:
                self._push(hooks, f"the hooks of {path}")

    def _drain(self) -> None:
        while self._pending:
            self._visit(*self._pending.popleft())

    def _hold(self, holder: Holder) -> None:
        """Note a holder, and follow what it holds."""
        self.holders.append(holder)
        for number, value in enumerate(holder.read()):
            if type(value) not in ATOMS:
                self._push(value, holder.name(number))

    def _visit(self, thing: Any, path: str, open_levels: int) -> None:
        kind = type(thing)
        if isinstance(thing, dict):
            if "__spec__" not in thing:  # the globals of a module
                self.holders.append(Items(thing, path))
                for key, value in list(dict.items(thing)):
                    self._push(key, f"a key of {path}")
                    self._push(value, item_name(path, key))
        elif isinstance(thing, list | collections.deque):
            self._hold(Elements(thing, path))
        elif isinstance(thing, tuple):
            for number, value in enumerate(thing):
                self._push(value, element_name(thing, path, number))
        elif isinstance(thing, set):
            self._hold(Members(thing, path))
        elif isinstance(thing, frozenset):
            for value in thing:
                self._push(value, path)
        elif kind is types.FunctionType:
            self._visit_function(thing, path)
        elif kind is types.ModuleType:
            self._visit_module(thing, path)
        elif kind in CLOSED:
            for found in CLOSED[kind](thing, path, self._names):
                self._hold(found) if isinstance(found, Holder) else self._push(*found)
        elif isinstance(thing, type):
            self._visit_class(thing, path)
        elif isinstance(thing, np.ndarray):
            if thing.nbytes > LARGEST_ARRAY:
                self.unwatched.append(f"{path}, a NumPy array of {thing.nbytes} bytes")
            else:
                self._hold(ArrayBytes(thing, path))
        if not isinstance(thing, type) and kind not in CLOSED and kind not in _NO_INSTANCES:
            self._visit_object(thing, path, open_levels)

    def _visit_module(self, module: types.ModuleType, path: str) -> None:
        """A module of Python: of torch, JAX and the like, only functions that code names."""
        own = vars(module)
        if is_open_module(module.__name__):
            self._spaces.append((own, path))
            self._hold_attributes(own, path, self._names)
        elif self._executed is not None:
            names = self._names
            keys = [key for key in own if key in names and _is_function(own[key])]
            absent = frozenset(key for key in self._asked[id(module)] if key not in own)
            wanted = {"awaited": absent.__contains__, "absent": tuple(absent)}
            self._hold(Names(own, keys, f"{path}.", **wanted))

    def _visit_object(self, thing: Any, path: str, open_levels: int) -> None:
        """An instance of some class, a container's subclass among them."""
        kind = type(thing)
        if isinstance(thing, torch.nn.Module):
            self.modules.append(thing)
        elif isinstance(thing, torch.optim.Optimizer):
            self.optimizers.append(thing)
        elif isinstance(thing, torch.amp.GradScaler):
            self.scalers.append(thing)
        elif not is_open_kind(kind):
            if kind.__module__.startswith("isoshard."):
                self._push(
                    vars(thing).get("__wrapped__") if hasattr(thing, "__dict__") else None, path
                )
            if hasattr(kind, "__next__"):
                self.unwatched.append(f"{path}, a {kind.__name__}, may be advanced by it")
            return
        if not kind.__flags__ & IMMUTABLE:
            if self._kinds is None:
                self._kinds = Kinds([], "")
                self.holders.append(self._kinds)
            self._kinds.thing.append(thing)
        own = getattr(thing, "__dict__", None)
        executed = self._executed
        if executed is not None and id(thing) in executed.open_names:
            open_levels = OPEN_LEVELS
        every = executed is None or open_levels > 0 or kind.__module__ in OPEN_STDLIB
        if type(own) is dict and (own or kind is not collections.OrderedDict):
            awaited = counts if every else self._awaited
            keys = [key for key in own if awaited(key)]
            if self._namespaces is None:
                self._namespaces = Namespaces([], "")
                self.holders.append(self._namespaces)
            self._namespaces.thing.append(thing)
            self.holders.append(Names(own, keys, f"{path}.", awaited=awaited))
            for key in keys:
                self._push(own[key], attribute_name(thing, path, key), open_levels=open_levels - 1)
        for base in kind.__mro__:
            if "__slots__" in vars(base):
                slots = [
                    name
                    for name, value in vars(base).items()
                    if isinstance(value, types.MemberDescriptorType)
                    and (every or name in self._names)
                ]
                self._hold(Fields(thing, slots, f"{path}."))
        self._push(kind, kind.__qualname__)

    def _visit_class(self, kind: type, path: str) -> None:
        for base in kind.__mro__:
            immutable = base.__flags__ & IMMUTABLE
            if immutable or not is_open_kind(base) or issubclass(base, enum.Enum):
                continue
            self._push(base, base.__qualname__)
            if base is not kind:
                continue
            own = vars(base)
            if self._executed is not None:
                keys = [key for key in own if self._is_read(key, own[key])]
                awaited = self._names.__contains__
                self._hold(Names(own, keys, f"{path}.", owner=base, awaited=awaited))
                continue
            plain = []
            for key, value in list(own.items()):
                if isinstance(value, FUNCTIONS):
                    if self._runs or key in self._names:
                        self._push(value, f"{path}.{key}")
                    else:
                        self._waiting[key].append((value, f"{path}.{key}"))
                elif not key.startswith("__") and not isinstance(value, DESCRIPTORS):
                    plain.append(key)
            is_new = functools.partial(_is_new, frozenset(own))
            self._hold(Names(own, plain, f"{path}.", owner=base, awaited=is_new))

    def _is_read(self, key: str, value: Any) -> bool:
        """Whether a value of a class was read; torch calls its functions and asks them nothing."""
        if key in self._names and not (isinstance(value, FUNCTIONS) and is_torchs(value)):
            return True
        return self._ran(value)

    def _ran(self, value: Any) -> bool:
        """Whether a value of a class is a function that ran."""
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        return self._executed is not None and id(code) in self._executed.ids

    def _visit_function(self, function: Any, path: str) -> None:
        code = function.__code__
        is_inside = is_internal(code)
        if self._executed is not None and id(code) not in self._executed.ids:
            if not is_inside and not is_torchs(function):
                self._visit_unrun(function, path)
            return
        if vars(function) and (self._executed is None or not is_torchs(function)):
            self._push(vars(function), f"{path}.__dict__")
        if self._runs and not is_inside and id(code) not in self._begun:
            self._functions[id(code)].append((function, path))
            return
        self._visit_ran(function, path)
        if self._executed is None and not self._runs and not is_inside:
            self._visit_code(code, function.__globals__)

    def _visit_unrun(self, function: Any, path: str) -> None:
        """A function that did not run, of which a program can read what it consists of."""
        self.holders.append(Fields(function, FUNCTION_FIELDS, f"{path}."))
        self._push(function.__defaults__, f"{path}.__defaults__")
        self._push(function.__kwdefaults__, f"{path}.__kwdefaults__")
        if vars(function):
            self._push(vars(function), f"{path}.__dict__")

    def _visit_ran(self, function: Any, path: str) -> None:
        """What a function uses when it runs, beside globals: its code, defaults and closure."""
        is_fixed = is_of_torch(function.__code__)
        if not is_fixed:
            self.holders.append(Fields(function, FUNCTION_FIELDS, f"{path}."))
        self._push(function.__defaults__, f"{path}.__defaults__")
        self._push(function.__kwdefaults__, f"{path}.__kwdefaults__")
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                holder = Cell(cell, name)
                if is_fixed:
                    self._push(holder.read()[0], name)
                else:
                    self._hold(holder)

    def _visit_code(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        if (id(code), id(namespace)) in self._codes:
            return
        self._codes.add((id(code), id(namespace)))
        seen = described(code)
        self._hold_globals(namespace, seen.globals)
        for name in seen.names - self._names:
            self._names.add(name)
            for thing, path in self._waiting.pop(name, ()):
                self._seen[id(thing)] = thing
                self._pending.append((thing, path, 0))
        for inside in seen.inside:
            self._visit_code(inside, namespace)


def _is_awaited(names: Container[str], key: str) -> bool:
    """Whether an attribute is a program's, and read."""
    return key in names and counts(key)


def _is_given(names: Container[str] | None, key: str) -> bool:
    """Whether an attribute of a tensor is a program's, and may be read: None is any name."""
    return key not in TENSOR_FIELDS and (names is None or key in names)


def _is_new(known: Container[str], key: str) -> bool:
    """Whether a program gave an attribute to a class meanwhile."""
    return key not in known and not key.startswith("__")


def _is_function(value: Any) -> bool:
    """Whether a module of torch, JAX or Python holds a function, a class, or such a module."""
    return callable(value) or isinstance(value, types.ModuleType)


def modules_of(function: Any) -> list[torch.nn.Module]:
    """Every module behind a function, once."""
    found = Reachable()
    found.follow(function, getattr(function, "__name__", "function"))
    return found.modules


_NO_INSTANCES = (types.FunctionType, types.ModuleType)
