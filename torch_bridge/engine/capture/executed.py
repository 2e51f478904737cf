"""Which Python code ran while a step was captured, and what it asked that no guard can watch.

An attribute, global or variable can only have been read by name if code that ran mentions the name.
`Executed` notes every code object whose frame began inside its context (by `sys.setprofile`, which
Python calls for frames and for C functions), so the names are known afterwards.

>>> def step():
...     return LIMIT * 2
>>> LIMIT = 4
>>> with Executed() as executed:
...     _ = step()
>>> id(step.__code__) in executed.codes, "LIMIT" in described(step.__code__).globals
(True, True)

What a program may ask that leaves no trace in any object is noted as a reason why the step cannot
be replayed: the time, Python's and NumPy's own random numbers, files.
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

from isoshard.core.runtime._jax_internals.compilation import record_event
from isoshard.core.runtime.caches import cached

from .holders import Holder

_GETATTR = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_ANY_NAME = frozenset({"vars", "__getattribute__", "attrgetter", "getattr_static"})
_SPACES = frozenset({"globals", "vars", "eval", "exec", "__globals__"})
_ATTRIBUTES = frozenset(
    {
        *("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR", "DELETE_ATTR"),
        *("LOAD_SUPER_METHOD", "IMPORT_FROM"),
    }
)


Codes = dict[int, tuple[types.CodeType, dict[str, Any]]]
"""Code objects by id, as code with constants of dynamo's cannot be hashed; and their globals."""


class Executed:
    """Context that notes the code that runs on this thread.

    Args:
        begins: called with the first frame of each code object in `codes`, before it runs.

    Attributes:
        codes: the code objects of the user and of libraries by id, with the globals of each.
        ids: ids of all code objects that ran, those of torch's and our own internals too.
        names: what the codes mention: attributes, and strings that may be keys.
        stored: attributes and globals that they set or delete.
        only_stored: those of them that no code reads.
        stores_items: whether a code sets or deletes an item of something.
        open_names: ids of the objects that code which computes names has at hand.
        variables: the environment variables that were asked for.
        asked: what keeps values that the code took for constants.
        reasons: why the step cannot be replayed, with the user's line.
        is_partial: whether code ran that dynamo made of other code.
    """

    def __init__(self, begins: Callable[[types.FrameType], None] | None = None) -> None:
        """Nothing ran yet."""
        self._begins = begins
        self.codes: Codes = {}
        self.ids: set[int] = set()
        self.open_names: set[int] = set()
        self.variables: set[str] = set()
        self.asked: list[Holder] = []
        self.reasons: list[str] = []
        self.is_partial = False
        self._around: Executed | None = None
        self._beside = 0
        self._collecting: set[int] = set()
        self._kept: list[types.CodeType] = []
        self._open: set[int] = set()
        self._plain: set[int] = set()
        """Ids of code that ran before, and whose next frames tell nothing new."""

    def __enter__(self) -> Executed:
        """Begin to note."""
        self._random = _random_state()
        self._before = sys.getprofile()
        self._around = current()
        self._collecting = {id(getattr(one, "__code__", None)) for one in gc.callbacks}
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        """End; whatever profiled before goes on."""
        sys.setprofile(None)
        before: Any = self._before
        if hasattr(before, "enable"):  # cProfile
            before.enable()
        else:
            sys.setprofile(before)
        if _random_state() != self._random:
            self.reasons.append("it draws from Python's or NumPy's random numbers")
        if self._around is not None:
            self._around.include(self)

    def include(self, other: Executed) -> None:
        """Let what another one noted have run here as well."""
        self.codes.update(other.codes)
        self.ids |= other.ids
        self.open_names |= other.open_names
        self.variables |= other.variables
        self.asked += other.asked
        self.reasons += [reason for reason in other.reasons if reason not in self.reasons]
        self.is_partial |= other.is_partial
        self._kept += other._kept

    def _note(self, frame: types.FrameType, event: str, asked: Any) -> None:
        """Called for all frames and C functions of a step: most of them tell nothing new."""
        if event == "call" or event == "return":
            if id(frame.f_code) not in self._plain:
                self._note_new(frame, event, asked)
        elif event == "c_call" and (id(asked) in _UNWATCHED or asked.__name__ in _METHODS):
            self._note_new(frame, event, asked)

    def _note_new(self, frame: types.FrameType, event: str, asked: Any) -> None:
        if self._is_beside(frame):
            self._beside += {"call": 1, "return": -1}.get(event, 0)
        elif self._beside:
            return
        elif event == "call":
            code = frame.f_code
            key = id(code)
            if key not in self.ids:
                self.ids.add(key)
                self._kept.append(code)
                if not is_internal(code):
                    self.codes[key] = (code, frame.f_globals)
                    self.is_partial |= is_dynamos(code)
                    if described(code).is_open:
                        self._open.add(key)
                    if self._begins is not None:
                        self._begins(frame)
            if key in self._open:
                self.open_names.update(map(id, frame.f_locals.values()))
                get = frame.f_globals.get
                self.open_names.update(id(get(name)) for name in frame.f_code.co_names)
            elif code is _ENVIRON:
                self.variables.add(frame.f_locals["key"])
            elif code.co_name != "<module>" and key not in self._collecting:
                self._plain.add(key)
        elif event == "c_call":
            what = _UNWATCHED.get(id(asked)) or _METHODS.get(asked.__name__)
            if what is not None:
                user: types.FrameType | None = frame
                while asked is builtins.open and user is not None and _is_python(user.f_code):
                    user = user.f_back
                if user is not None and not is_internal(user.f_code):
                    self._note_call(user, asked, what)

    def _is_beside(self, frame: types.FrameType) -> bool:
        """Whether a frame runs beside the step.

        So does a module being imported, once, a collection, or what listens to JAX's events.
        """
        code, around = frame.f_code, frame.f_back
        imported = code.co_name == "<module>" and _is_imported(frame)
        told = around is not None and around.f_code.co_filename == _EVENTS
        return imported or told or id(code) in self._collecting

    def _note_call(self, frame: types.FrameType, asked: Any, what: str) -> None:
        owner = getattr(asked, "__self__", None)
        if asked.__name__ in _METHODS and type(owner) not in (torch.Tensor, torch.nn.Parameter):
            return
        reason = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} calls {what}"
        if reason not in self.reasons:
            self.reasons.append(reason)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """See the class."""
        return frozenset().union(*(described(code).names for code, _ in self.codes.values()))

    @functools.cached_property
    def stored(self) -> frozenset[str]:
        """See the class."""
        return frozenset().union(*(described(code).stored for code, _ in self.codes.values()))

    @functools.cached_property
    def only_stored(self) -> frozenset[str]:
        """See the class."""
        return self.stored - frozenset().union(
            *(described(code).read for code, _ in self.codes.values())
        )

    @functools.cached_property
    def stores_items(self) -> bool:
        """See the class."""
        return any(described(code).stores_items for code, _ in self.codes.values())


def current() -> Executed | None:
    """What notes the code of this thread now; None while nothing does."""
    found = getattr(sys.getprofile(), "__self__", None)
    return found if isinstance(found, Executed) else None


def _is_imported(frame: types.FrameType) -> bool:
    """Whether a frame is a module's, while it is imported: `eval` and `exec` bring no loader."""
    code, loader = frame.f_code, frame.f_globals.get("__loader__")
    return loader is not None and code.co_filename == frame.f_globals.get("__file__")


def is_dynamos(code: types.CodeType) -> bool:
    """Whether dynamo made code of other code, whose names it does not tell."""
    return any(name.startswith("__compiled_fn") for name in code.co_names)


class Described:
    """What is seen in a code object without running it; code inside it is apart.

    Attributes:
        names: the attributes that it reads or sets, and strings that may be keys or attributes.
        globals: the globals that it reads or sets; all names and strings, if it asks for `globals`.
        asked: what it reads of a global, by name: `(module, attribute)`.
        imports: modules that it imports, with how many packages up a relative name begins.
        read: names that it reads.
        stored: attributes and globals that it sets or deletes.
        stores_items: whether it sets or deletes an item.
        is_open: whether it computes names of attributes.
        inside: code of functions and classes that it defines.
    """

    __slots__ = (
        *("asked", "globals", "imports", "inside", "is_open", "names", "read", "stored"),
        "stores_items",
    )

    def __init__(self, code: types.CodeType):
        """Look through its instructions."""
        names, spaces, read, stored = set[str](), set[str](), set[str](), set[str]()
        asked, imports = set[tuple[str, str]](), set[tuple[int, str]]()
        self.stores_items = False
        instructions = list(dis.get_instructions(code))
        for place, instruction in enumerate(instructions):
            kind, name = instruction.opname, instruction.argval
            if kind in ("STORE_SUBSCR", "DELETE_SUBSCR"):
                self.stores_items = True
            elif kind == "IMPORT_NAME":
                level = instructions[place - 2].argval
                imports.add((level if isinstance(level, int) else 0, name))
            elif not isinstance(name, str):
                continue
            elif "GLOBAL" in kind or kind.endswith("_NAME"):
                spaces.add(name)
                after = instructions[place + 1]
                if after.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST")):
                    if isinstance(after.argval, str):
                        asked.add((name, after.argval))
            elif kind in _ATTRIBUTES:
                names.add(name)
            if kind in ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"):
                stored.add(name)
            elif kind.startswith("LOAD_") and not kind.startswith("LOAD_FAST"):
                read.add(name)
        self.is_open = (
            not _ANY_NAME.isdisjoint(code.co_names)
            or _computes_a_name(code, instructions)
            or _takes_a_dict(code, instructions)
        )
        self.inside = tuple([one for one in code.co_consts if isinstance(one, types.CodeType)])
        names |= _strings(code.co_consts)
        self.names = frozenset(names)
        self.globals = frozenset(spaces if _SPACES.isdisjoint(spaces) else spaces | names)
        self.asked, self.imports = frozenset(asked), frozenset(imports)
        self.read = frozenset(read)
        self.stored = frozenset(stored)


_DESCRIBED: dict[int, tuple[types.CodeType, Described]] = {}  # by id: codes are slow to compare


def described(code: types.CodeType) -> Described:
    """What is seen in a code object; looked at once for as long as it is among the last 4,096."""
    found = _DESCRIBED.get(id(code))
    if found is None:
        if len(_DESCRIBED) >= 4096:
            _DESCRIBED.clear()
        found = _DESCRIBED[id(code)] = (code, Described(code))
    return found[1]


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
    for place, instruction in enumerate(instructions):
        if instruction.argval in _GETATTR and instruction.opname.startswith("LOAD_"):
            if not _second_argument_is_constant(instructions[place + 1 :]):
                return True
    return False


def _takes_a_dict(code: types.CodeType, instructions: list[dis.Instruction]) -> bool:
    """Whether an object's `__dict__` is used but for an item, or whether there is one, by a name.

    >>> def named(thing):
    ...     return thing.__dict__["scale"] if "scale" in thing.__dict__ else None
    >>> described(named.__code__).is_open, described((lambda x: dict(x.__dict__)).__code__).is_open
    (False, True)
    >>> described((lambda x: x.__dict__).__code__).is_open
    True
    """
    if "__dict__" not in code.co_names:
        return False
    for place, instruction in enumerate(instructions):
        if instruction.argval == "__dict__" and instruction.opname.startswith("LOAD_"):
            before, after = instructions[:place], instructions[place + 1 :]
            if after[0].opname == "CONTAINS_OP":
                is_named = before[-1].opname.startswith("LOAD_FAST") and _is_a_name(before[-2])
            else:
                is_named = _is_a_name(after[0]) and (
                    after[1].opname == "BINARY_SUBSCR" or after[1].argrepr == "[]"
                )
            if not is_named:
                return True
    return False


def _is_a_name(instruction: dis.Instruction) -> bool:
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


# Code that belongs to Python, torch or us: what it reads is constant, or followed in other ways.
_TORCH = str(Path(torch.__file__).parent) + os.sep
_WATCHED_TORCH = tuple(
    _TORCH + name for name in ("nn" + os.sep, "optim" + os.sep, "amp" + os.sep, "distributions")
)
_ROOMS = ("core", "torch_bridge", "jax_bridge", "onnx_bridge", "cli", "src")
_HOME = Path(__file__).parents[3]
_OURS = (*(str(_HOME / room) + os.sep for room in _ROOMS), str(_HOME / "__init__.py"))
_MODULES_OF_OURS = tuple(  # which users hold, and whose mode and attributes they change
    str(_HOME / "torch_bridge" / Path(name))
    for name in ("interop/flax_module.py", "interop/assume_pure.py", "torch_xla/core/functions.py")
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
    """Where a library is installed, which need not be where this package is."""
    spec = importlib.util.find_spec(library)
    places = None if spec is None else spec.submodule_search_locations
    return f"{places[0]}{os.sep}" if places else getattr(spec, "origin", None)


_CLOSED = tuple(folder for folder in map(_folder, _LIBRARIES) if folder is not None)


@cached(4096)
def _is_internal(filename: str) -> bool:
    if filename.startswith(_TORCH):
        return not filename.startswith(_WATCHED_TORCH)
    if filename.startswith((*_OURS, *_CLOSED, "<frozen ")):
        return not filename.startswith(_MODULES_OF_OURS)
    return _is_of_python(filename)


def is_of_torch(code: types.CodeType) -> bool:
    """Whether code is torch's, whoever's function a decorator says that it is."""
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
        *(part.tobytes() if hasattr(part, "tobytes") else part for part in state),
    )


_ENVIRON = type(os.environ).__getitem__.__code__
_METHODS = {name: f"{name}() of a tensor on the CPU" for name in ("numpy", "tolist", "data_ptr")}
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_UNWATCHED: dict[int, str] = {
    id(function): f"{function.__name__}()"
    for function in (
        *(builtins.open, builtins.input, os.urandom, os.getcwd, os.listdir, os.scandir),
        *(os.stat, os.lstat, os.access, os.getloadavg),
    )
}
"""C functions whose results change by themselves, by id (they live for ever)."""
for _clock in _CLOCKS:
    _UNWATCHED[id(getattr(time, _clock))] = f"time.{_clock}()"
    _UNWATCHED[id(getattr(time, f"{_clock}_ns"))] = f"time.{_clock}_ns()"
