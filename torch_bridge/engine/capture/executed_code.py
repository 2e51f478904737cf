"""Which Python code ran while a step was captured, and what it called that no guard can watch.

User code can only have read an attribute, global or variable by name if code that ran mentions the
name. `ExecutedCode` records every code object whose frame began inside its context (by
`sys.setprofile`, which Python calls for frames and for C functions), so the names are known
afterwards.

>>> def step():
...     return LIMIT * 2
>>> LIMIT = 4
>>> with ExecutedCode() as executed:
...     _ = step()
>>> id(step.__code__) in executed.codes, "LIMIT" in code_names(step.__code__).globals
(True, True)

Calls whose results change without a trace in any object are reasons against a replay: the time,
Python's and NumPy's own random numbers, files.

The profile function takes longer than most calls. Of the frames below an operation on the device,
hundreds for a list of parameters, none can read what a guard watches, so they are skipped
(`SkippedFrames`); but a dispatch mode, a tensor subclass or an operator may be a user's, and its
code is recorded as all other is.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import importlib.util
import os
import random
import sys
import sysconfig
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from isoshard.core.installation import source_folders
from isoshard.core.runtime._jax_internals.compilation import record_event
from isoshard.core.runtime.caches import cached

from .guard_sources import Source

_GETATTR = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_DYNAMIC = frozenset({"vars", "__getattribute__", "attrgetter", "getattr_static"})
_NAMESPACES = frozenset({"globals", "vars", "eval", "exec", "__globals__"})
_ATTRIBUTES = frozenset(
    {
        *("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR", "DELETE_ATTR"),
        *("LOAD_SUPER_METHOD", "IMPORT_FROM"),
    }
)


Codes = dict[int, tuple[types.CodeType, dict[str, Any]]]
"""Code objects and their globals, by id: code with constants of dynamo is not hashable."""


class ExecutedCode:
    """Context that records the code that runs on this thread.

    Args:
        on_first_frame: called with the first frame of each code object in `codes`, before it runs.

    Attributes:
        codes: the code objects of the user and of libraries by id, with the globals of each.
        ids: ids of all code objects that ran, including internals of torch and of this package.
        names: attributes that the codes name, and strings that may be keys.
        stored: attributes and globals that they set or delete.
        only_stored: those of them that no code reads.
        stores_items: whether a code sets or deletes an item of something.
        dynamic_objects: ids of the locals and globals of code that computes attribute names.
        environment: the environment variables that were read.
        sources: sources of values that the code took for constants.
        reasons: why the step cannot be replayed, with the user's line.
        is_partial: whether code ran that dynamo compiled from other code.
    """

    def __init__(self, on_first_frame: Callable[[types.FrameType], None] | None = None) -> None:
        """See the class."""
        self._on_first_frame = on_first_frame
        self.codes: Codes = {}
        self.ids: set[int] = set()
        self.dynamic_objects: set[int] = set()
        self.environment: set[str] = set()
        self.sources: list[Source] = []
        self.reasons: list[str] = []
        self.is_partial = False
        self._outer: ExecutedCode | None = None
        self._skip_depth = 0
        self._gc_callbacks: set[int] = set()
        self._alive: list[types.CodeType] = []
        self._dynamic: set[int] = set()
        self._recorded: set[int] = set()
        """Ids of code whose further frames need no record."""

    def __enter__(self) -> ExecutedCode:
        """Set the profile function."""
        self._random = _random_state()
        self._outer_profiler = sys.getprofile()
        self._outer = active()
        self._gc_callbacks = {id(getattr(callback, "__code__", None)) for callback in gc.callbacks}
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *exc: object) -> None:
        """Restore the earlier profile function."""
        sys.setprofile(None)
        outer: Any = self._outer_profiler
        if hasattr(outer, "enable"):  # cProfile
            outer.enable()
        else:
            sys.setprofile(outer)
        if _random_state() != self._random:
            self.reasons.append("it draws from Python's or NumPy's random numbers")
        if self._outer is not None:
            self._outer.include(self)

    def include(self, other: ExecutedCode) -> None:
        """Add the code that another context recorded."""
        self.codes.update(other.codes)
        self.ids |= other.ids
        self.dynamic_objects |= other.dynamic_objects
        self.environment |= other.environment
        self.sources += other.sources
        self.reasons += [reason for reason in other.reasons if reason not in self.reasons]
        self.is_partial |= other.is_partial
        self._alive += other._alive

    def _profile(self, frame: types.FrameType, event: str, callee: Any) -> None:
        """The profile function: called for all frames and C functions, most of them known."""
        if event == "call" or event == "return":
            if id(frame.f_code) not in self._recorded:
                self._record(frame, event, callee)
        elif event == "c_call" and (id(callee) in _UNGUARDABLE or callee.__name__ in _METHODS):
            self._record(frame, event, callee)

    def _record(self, frame: types.FrameType, event: str, callee: Any) -> None:
        if self._is_skipped(frame):
            self._skip_depth += {"call": 1, "return": -1}.get(event, 0)
        elif self._skip_depth:
            return
        elif event == "call":
            code = frame.f_code
            key = id(code)
            if key not in self.ids:
                self.ids.add(key)
                self._alive.append(code)
                if not is_internal(code):
                    self.codes[key] = (code, frame.f_globals)
                    self.is_partial |= is_from_dynamo(code)
                    if code_names(code).is_dynamic:
                        self._dynamic.add(key)
                    if self._on_first_frame is not None:
                        self._on_first_frame(frame)
            if key in self._dynamic:
                self.dynamic_objects.update(map(id, frame.f_locals.values()))
                get = frame.f_globals.get
                self.dynamic_objects.update(id(get(name)) for name in frame.f_code.co_names)
            elif code is _ENVIRON:
                self.environment.add(frame.f_locals["key"])
            elif code.co_name != "<module>" and key not in self._gc_callbacks:
                self._recorded.add(key)
        elif event == "c_call":
            call = _UNGUARDABLE.get(id(callee)) or _METHODS.get(callee.__name__)
            if call is not None:
                user: types.FrameType | None = frame
                while callee is builtins.open and user is not None and _is_python(user.f_code):
                    user = user.f_back
                if user is not None and not is_internal(user.f_code):
                    self._record_call(user, callee, call)

    def _is_skipped(self, frame: types.FrameType) -> bool:
        """Whether a frame is of an import, a garbage collection, or a listener of JAX's events."""
        code, caller = frame.f_code, frame.f_back
        imported = code.co_name == "<module>" and _is_imported(frame)
        is_listener = caller is not None and caller.f_code.co_filename == _EVENTS
        return imported or is_listener or id(code) in self._gc_callbacks

    def _record_call(self, frame: types.FrameType, callee: Any, call: str) -> None:
        owner = getattr(callee, "__self__", None)
        if callee.__name__ in _METHODS and type(owner) not in (torch.Tensor, torch.nn.Parameter):
            return
        reason = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} calls {call}"
        if reason not in self.reasons:
            self.reasons.append(reason)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """See the class."""
        return frozenset().union(*(code_names(code).names for code, _ in self.codes.values()))

    @functools.cached_property
    def stored(self) -> frozenset[str]:
        """See the class."""
        return frozenset().union(*(code_names(code).stored for code, _ in self.codes.values()))

    @functools.cached_property
    def only_stored(self) -> frozenset[str]:
        """See the class."""
        return self.stored - frozenset().union(
            *(code_names(code).read for code, _ in self.codes.values())
        )

    @functools.cached_property
    def stores_items(self) -> bool:
        """See the class."""
        return any(code_names(code).stores_items for code, _ in self.codes.values())


def active() -> ExecutedCode | None:
    """The context that records this thread, or None."""
    owner = getattr(sys.getprofile(), "__self__", None)
    return owner if isinstance(owner, ExecutedCode) else None


def _is_imported(frame: types.FrameType) -> bool:
    """Whether a frame is of a module that is being imported: `eval` and `exec` have no loader."""
    code, loader = frame.f_code, frame.f_globals.get("__loader__")
    return loader is not None and code.co_filename == frame.f_globals.get("__file__")


def is_from_dynamo(code: types.CodeType) -> bool:
    """Whether dynamo compiled code from other code, whose names are lost."""
    return any(name.startswith("__compiled_fn") for name in code.co_names)


class CodeNames:
    """The names in a code object, without those of nested code.

    Attributes:
        names: the attributes that it reads or sets, and strings that may be keys or attributes.
        globals: the globals that it reads or sets; all names and strings, if it uses `globals`.
        module_attributes: what it reads of a global, by name: `(module, attribute)`.
        imports: modules that it imports, with how many packages up a relative name begins.
        read: names that it reads.
        stored: attributes and globals that it sets or deletes.
        stores_items: whether it sets or deletes an item.
        is_dynamic: whether it computes names of attributes.
        nested: code of functions and classes that it defines.
    """

    __slots__ = (
        *("globals", "imports", "is_dynamic", "module_attributes", "names", "nested", "read"),
        *("stored", "stores_items"),
    )

    def __init__(self, code: types.CodeType):
        """Read its instructions."""
        names, global_names, read, stored = set[str](), set[str](), set[str](), set[str]()
        module_attributes, imports = set[tuple[str, str]](), set[tuple[int, str]]()
        self.stores_items = False
        instructions = list(dis.get_instructions(code))
        for index, instruction in enumerate(instructions):
            opcode, name = instruction.opname, instruction.argval
            if opcode in ("STORE_SUBSCR", "DELETE_SUBSCR"):
                self.stores_items = True
            elif opcode == "IMPORT_NAME":
                level = instructions[index - 2].argval
                imports.add((level if isinstance(level, int) else 0, name))
            elif not isinstance(name, str):
                continue
            elif "GLOBAL" in opcode or opcode.endswith("_NAME"):
                global_names.add(name)
                after = instructions[index + 1]
                if after.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST")):
                    if isinstance(after.argval, str):
                        module_attributes.add((name, after.argval))
            elif opcode in _ATTRIBUTES:
                names.add(name)
            if opcode in ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"):
                stored.add(name)
            elif opcode.startswith("LOAD_") and not opcode.startswith("LOAD_FAST"):
                read.add(name)
        self.is_dynamic = (
            not _DYNAMIC.isdisjoint(code.co_names)
            or _computes_a_name(code, instructions)
            or _reads_other_than_names(code, instructions)
        )
        self.nested = tuple(
            [const for const in code.co_consts if isinstance(const, types.CodeType)]
        )
        names |= _strings(code.co_consts)
        self.names = frozenset(names)
        self.globals = frozenset(
            global_names if _NAMESPACES.isdisjoint(global_names) else global_names | names
        )
        self.module_attributes, self.imports = frozenset(module_attributes), frozenset(imports)
        self.read = frozenset(read)
        self.stored = frozenset(stored)


_CODE_NAMES: dict[int, tuple[types.CodeType, CodeNames]] = {}  # by id: codes are slow to compare


def code_names(code: types.CodeType) -> CodeNames:
    """The names in a code object, from a cache of 4,096."""
    entry = _CODE_NAMES.get(id(code))
    if entry is None:
        if len(_CODE_NAMES) >= 4096:
            _CODE_NAMES.clear()
        entry = _CODE_NAMES[id(code)] = (code, CodeNames(code))
    return entry[1]


def _strings(constant: Any) -> set[str]:
    if isinstance(constant, str):
        return {constant}
    if isinstance(constant, tuple | frozenset):
        return set().union(*map(_strings, constant)) if constant else set()
    return set()


def _computes_a_name(code: types.CodeType, instructions: list[dis.Instruction]) -> bool:
    """Whether `getattr` and its like are called with a name that is no constant."""
    if _GETATTR.isdisjoint(code.co_names):
        return False
    for index, instruction in enumerate(instructions):
        if instruction.argval in _GETATTR and instruction.opname.startswith("LOAD_"):
            if not _second_argument_is_constant(instructions[index + 1 :]):
                return True
    return False


def _reads_other_than_names(code: types.CodeType, instructions: list[dis.Instruction]) -> bool:
    """Whether code uses a `__dict__` other than by `[name]` or `name in`, with constant names.

    >>> def named(thing):
    ...     return thing.__dict__["scale"] if "scale" in thing.__dict__ else None
    >>> code_names(named.__code__).is_dynamic
    False
    >>> code_names((lambda x: dict(x.__dict__)).__code__).is_dynamic
    True
    >>> code_names((lambda x: x.__dict__).__code__).is_dynamic
    True
    """
    if "__dict__" not in code.co_names:
        return False
    for index, instruction in enumerate(instructions):
        if instruction.argval == "__dict__" and instruction.opname.startswith("LOAD_"):
            before, after = instructions[:index], instructions[index + 1 :]
            if after[0].opname == "CONTAINS_OP":
                is_named = before[-1].opname.startswith("LOAD_FAST") and _is_constant_name(
                    before[-2]
                )
            else:
                is_named = _is_constant_name(after[0]) and (
                    after[1].opname == "BINARY_SUBSCR" or after[1].argrepr == "[]"
                )
            if not is_named:
                return True
    return False


def _is_constant_name(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith("LOAD_CONST") and isinstance(instruction.argval, str)


def _second_argument_is_constant(instructions: list[dis.Instruction]) -> bool:
    """Whether the second argument of the call that these instructions prepare is a string."""
    depth, is_constant = 0, False
    for instruction in instructions:
        if "CALL" in instruction.opname and depth in (2, 3) and instruction.arg == depth:
            return is_constant
        has_argument = instruction.opcode >= dis.HAVE_ARGUMENT
        argument = instruction.arg if has_argument else None
        depth += dis.stack_effect(instruction.opcode, argument, jump=False)
        if depth == 2:  # the second argument, so far
            is_string = isinstance(instruction.argval, str)
            is_constant = instruction.opname.startswith("LOAD_CONST") and is_string
    return False


# Code of Python, torch and this package: what it reads is constant, or guarded in other ways.
_TORCH = str(Path(torch.__file__).parent) + os.sep
_WATCHED_TORCH = tuple(
    _TORCH + name for name in ("nn" + os.sep, "optim" + os.sep, "amp" + os.sep, "distributions")
)
_PACKAGE = Path(__file__).parents[3]
_OURS = (*(str(folder) + os.sep for folder in source_folders()), str(_PACKAGE / "__init__.py"))
_USER_FACING = tuple(  # whose objects users change
    str(_PACKAGE / name)
    for name in (
        "torch_bridge/interop/flax_module.py",
        "torch_bridge/interop/assume_pure.py",
        "torch_xla_bridge/torch_xla/core/functions.py",
    )
)
_EVENTS = record_event.__code__.co_filename
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_SITE = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_IMPORTLIB = _STDLIB + "importlib" + os.sep
_LIBRARIES = (
    *("jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "opt_einsum", "_pytest", "pluggy"),
    *("filelock", "zstandard", "etils", "fsspec", "tensorstore", "absl"),  # of JAX's cache
    "typing_extensions",
)


def _folder(library: str) -> str | None:
    """The folder of a library, which may differ from the folder of this package."""
    spec = importlib.util.find_spec(library)
    folders = None if spec is None else spec.submodule_search_locations
    return f"{folders[0]}{os.sep}" if folders else getattr(spec, "origin", None)


_LIBRARY_FOLDERS = tuple(folder for folder in map(_folder, _LIBRARIES) if folder is not None)


@cached(4096)
def _is_internal(filename: str) -> bool:
    if filename.startswith(_TORCH):
        return not filename.startswith(_WATCHED_TORCH)
    if filename.startswith((*_OURS, *_LIBRARY_FOLDERS, "<frozen ")):
        return not filename.startswith(_USER_FACING)
    return _is_of_python(filename)


def is_of_torch(code: types.CodeType) -> bool:
    """Whether code is torch's, whatever module its function names."""
    return code.co_filename.startswith(_TORCH)


def is_internal(code: types.CodeType) -> bool:
    """Whether code is Python's, torch's (but for modules and optimizers), JAX's or ours."""
    return _is_internal(code.co_filename)


def _is_python(code: types.CodeType) -> bool:
    """Whether code is of Python's library, but for imports."""
    filename = code.co_filename
    return _is_of_python(filename) and not filename.startswith(_IMPORTLIB)


def _is_of_python(filename: str) -> bool:
    return filename.startswith(_STDLIB) and not any(site in filename for site in _SITE)


def _random_state() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy.random")
    state = () if numpy is None else numpy.get_state()
    return (
        random.getstate(),
        *(entry.tobytes() if hasattr(entry, "tobytes") else entry for entry in state),
    )


_ENVIRON = type(os.environ).__getitem__.__code__
_METHODS = {name: f"{name}() of a tensor on the CPU" for name in ("numpy", "tolist", "data_ptr")}
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_UNGUARDABLE: dict[int, str] = {
    id(function): f"{function.__name__}()"
    for function in (
        *(builtins.open, builtins.input, os.urandom, os.getcwd, os.listdir, os.scandir),
        *(os.stat, os.lstat, os.access, os.getloadavg),
    )
}
"""C functions whose results change without a trace, by id (they are never freed)."""
for _clock in _CLOCKS:
    _UNGUARDABLE[id(getattr(time, _clock))] = f"time.{_clock}()"
    _UNGUARDABLE[id(getattr(time, f"{_clock}_ns"))] = f"time.{_clock}_ns()"


class SkippedFrames:
    """Context in which no code of this thread is recorded, except what `call` calls.

    Example:
        >>> from isoshard.torch_bridge.engine.capture.executed_code import ExecutedCode
        >>> with ExecutedCode() as executed, SkippedFrames() as skipped:
        ...     _ = (lambda: "hidden")(), skipped.call(lambda: "recorded", (), {})
        >>> [name for name in ("hidden", "recorded") if name in executed.names]
        ['recorded']
    """

    __slots__ = ("_profiler",)

    def __enter__(self) -> SkippedFrames:
        """Pause the active `ExecutedCode`."""
        self._profiler = None if active() is None else sys.getprofile()
        if self._profiler is not None:
            sys.setprofile(None)
        return self

    def __exit__(self, *exc: object) -> None:
        """Resume it."""
        if self._profiler is not None:
            sys.setprofile(self._profiler)

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call what may run user code, which is recorded."""
        if self._profiler is None:
            return function(*args, **kwargs)
        sys.setprofile(self._profiler)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(None)
