"""isoshard in processes whose torch, JAX and other packages lack names that are not public.

    python -m tests.hidden_names                           # each name alone, then each module
    python -m tests.hidden_names torch._ops.OpOverload     # these names alone

A release of a dependency may drop a name. That may cost what needs the name, and never the import
of isoshard. So each row of the tables of private names is hidden: in a new process no code of
isoshard finds the attribute, or the module with all that is in it, by an import, by `getattr` or on
an instance. torch and JAX find it, because they need many of these names themselves. There every
module of isoshard is imported, an array is sharded, a number is added to a tensor on `jax`, and
what is bound to the name is called.

The processes are forked from a process that has imported all packages that isoshard imports, and
nothing of isoshard (`Server`): those imports take several times as long as isoshard's own. Each
fork still takes 3 to 4 seconds of processor time (1,050 modules, one compiled program), which is
ten minutes and more for all names. So `tests/test_hidden_names.py` hides 32 names at once. An
import that passes without all of them passes without each, except where code takes one path with a
name and another path without it; this command hides each name alone for that reason.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import dataclasses
import enum
import functools
import gc
import importlib
import inspect
import itertools
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import private_names

if TYPE_CHECKING:
    from isoshard.core.runtime.private_names import PrivateName

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("torch", "jax", "jaxlib", "flax.linen", "flax.nnx", "optax", "numpy", "onnx", "rich"),
    *("accelerate", "lightning.pytorch", "transformers"),
)
"""Imported before the first fork, whose process reports what else isoshard imports."""

FIRST = (
    *("isoshard", "isoshard.torch_bridge", "isoshard.jax_bridge", "isoshard.onnx_bridge"),
    *("isoshard.domain", "isoshard.planner"),
)
ROOMS = (
    *("isoshard", "isoshard.core", "isoshard.jax_bridge", "isoshard.onnx_bridge"),
    "isoshard.torch_bridge",
)
SKIPPED = "isoshard.torch_xla_bridge.torch_xla_backend"
"""Needs torch 2.9 and torch_xla."""

TABLES = (
    "isoshard.core.runtime._jax_internals",
    "isoshard.torch_bridge._torch_internals",
    "isoshard.torch_bridge.generation._transformers_internals",
    "isoshard.torch_bridge.trainers._lightning_internals",
)
UNHIDDEN = {
    "torch.autograd.graph.Node._sequence_nr": "the nodes of a graph are of classes in C",
    "torch.nn.Module.state_dict._metadata": "of a dictionary that torch makes for each call",
    "torch._functorch.aot_autograd.<compiled graph>._boxed_call": "is set on what is ours",
    "torch.random.manual_seed.<device module>._is_in_bad_fork": "is called on what is ours",
}
"""Rows that cannot be hidden, with the reason."""

ELSEWHERE = {"torch.nn.Parameter._is_param": "torch.Tensor._is_param"}
"""Rows that a class has for objects of another one."""

NOT_ADDED = ("no tensor can be made on the device", "`x + 1` among them")
"""Words of a row without which adding to a tensor on `jax` raises."""

_SECONDS = 300


@dataclasses.dataclass
class Outcome:
    """What happened in a process without some names.

    Attributes:
        hidden: the names that were there, and are hidden.
        failed: the modules of isoshard that cannot be imported, with the end of the traceback.
        missing: modules that need a package which is not installed.
        sharded: what sharding an array gave, or its error.
        added: what adding to a tensor on `jax` gave, or its error.
        uses: for each hidden name, "raises" or "substitute", or what went wrong.
        loaded: modules of other packages that were imported.
        rows: the paths of all rows.
        seconds: processor time.
        log: standard output and error.
    """

    hidden: list[str] = dataclasses.field(default_factory=list)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    sharded: str = ""
    added: str = ""
    uses: dict[str, str] = dataclasses.field(default_factory=dict)
    loaded: list[str] = dataclasses.field(default_factory=list)
    rows: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    log: str = ""


class Server:
    """A process that forks processes without names."""

    def __init__(self) -> None:
        """Start it; returns once everything is imported."""
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hidden_names", "--serve"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.all_there = self._answer()
        """The outcome where nothing is hidden."""

    def without(self, names: Sequence[str], planted: Mapping[str, str] | None = None) -> Outcome:
        """Fork a process that lacks some names.

        Args:
            names: dotted, of attributes or modules.
            planted: the source of some modules that are run in place of isoshard's, by name.
        """
        assert self._process.stdin is not None
        print(json.dumps({"names": list(names), "planted": planted}), file=self._process.stdin)
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        self._process.communicate()

    def _answer(self) -> Outcome:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that forks has ended; its error is above")
        return Outcome(**json.loads(line))


def serve() -> None:
    """Import other packages, then fork a process for each line of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.disable()
    for name in PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    first = _forked([], None)
    for name in first.loaded:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    first = dataclasses.replace(first, loaded=[])
    print(json.dumps(dataclasses.asdict(first)), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        outcome = _forked(request["names"], request["planted"])
        print(json.dumps(dataclasses.asdict(outcome)), file=answers, flush=True)


def _forked(names: Sequence[str], planted: Mapping[str, str] | None) -> Outcome:
    """The outcome in a child of this process."""
    log, reading, writing = os.memfd_create("log"), *os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.alarm(_SECONDS)
        gc.disable()
        began, outcome = time.process_time(), Outcome()
        try:
            _try(outcome, names, planted)
        except BaseException:
            outcome.failed["tests.hidden_names"] = traceback.format_exc()
        outcome.seconds = time.process_time() - began
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(dataclasses.asdict(outcome)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    os.lseek(log, 0, os.SEEK_SET)
    with os.fdopen(log, errors="replace") as written:
        printed = written.read()
    outcome = Outcome(**json.loads(text)) if text else Outcome()
    if not text:
        outcome.failed["tests.hidden_names"] = f"the process ended with status {status}"
    outcome.log = printed
    return outcome


def _try(outcome: Outcome, names: Sequence[str], planted: Mapping[str, str] | None) -> None:
    before = set(sys.modules)
    outcome.hidden = [name for name in names if _is_there(name)]
    _guard_imports()
    for name in outcome.hidden:
        hide(ELSEWHERE.get(name, name))
    outcome.failed, outcome.missing = imported(planted)
    if planted:
        return
    outcome.sharded = _result(_sharded)
    outcome.added = _result(_added)
    outcome.loaded = sorted(
        name for name in set(sys.modules) - before if not name.startswith("isoshard")
    )
    bound = _bound()
    for row in _rows():
        outcome.rows.append(row.path)
        gone = {row.path, row.formerly} & set(outcome.hidden)
        if gone or any(f"{row.path}.".startswith(f"{module}.") for module in _MODULES):
            outcome.uses[row.path] = _use(row, bound[row.path])


def hide(path: str) -> None:
    """Take a name out of isoshard's sight.

    torch and JAX need many of these names themselves, so it is there for everybody else.

    Args:
        path: of a module, or of an attribute of a module, a class or its instances.
    """
    owner, name = resolved(path.rpartition(".")[0]), path.rpartition(".")[2]
    if isinstance(sys.modules.get(path), types.ModuleType):
        _MODULES.add(path)
    if isinstance(owner, types.ModuleType):
        _NAMES_OF.setdefault(id(owner), set()).add(name)
        if not hasattr(type(owner), "hides"):
            kind = type(owner)
            owner.__class__ = type("Hiding", (kind,), {"__getattribute__": _read(kind), "hides": 1})
    elif isinstance(owner, type):
        hidden = _Hidden(name, inspect.getattr_static(owner, name, None))
        if issubclass(owner, enum.Enum):
            owner._member_map_.pop(name)
            type.__setattr__(owner, name, hidden)
        else:
            setattr(owner, name, hidden)
    else:
        delattr(owner, name)  # jax.memory is a namespace


_MODULES: set[str] = set()
_NAMES_OF: dict[int, set[str]] = {}


def _read(kind: type) -> Any:
    def read(module: Any, name: str) -> Any:
        if name in _NAMES_OF.get(id(module), ()) and _by_isoshard():
            raise AttributeError(f"{name} is hidden")
        return kind.__getattribute__(module, name)

    return read


class _Hidden:
    """An attribute of a class or its instances that isoshard does not see."""

    def __init__(self, name: str, descriptor: Any):
        self._name, self._descriptor = name, descriptor

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if _by_isoshard():
            raise AttributeError(f"{self._name} is hidden")
        if hasattr(self._descriptor, "__get__"):
            return self._descriptor.__get__(instance, owner)
        if instance is not None and self._name in vars(instance):
            return vars(instance)[self._name]
        if self._descriptor is None:
            raise AttributeError(self._name)
        return self._descriptor

    def __set__(self, instance: Any, value: Any) -> None:
        if hasattr(self._descriptor, "__set__"):
            self._descriptor.__set__(instance, value)
        else:
            vars(instance)[self._name] = value

    def __delete__(self, instance: Any) -> None:
        del vars(instance)[self._name]


def _by_isoshard() -> bool:
    """Whether code of isoshard asks, and not the import system for somebody else."""
    frame: Any = sys._getframe(2)
    while frame.f_globals["__name__"].startswith(("importlib", __name__)):
        frame = frame.f_back
    return frame.f_globals["__name__"].startswith("isoshard")


def _guard_imports() -> None:
    """Let no import of isoshard's see a hidden module."""
    import_module, statement = importlib.import_module, builtins.__import__

    def check(name: str) -> None:
        if any(f"{name}.".startswith(f"{hidden}.") for hidden in _MODULES) and _by_isoshard():
            raise ModuleNotFoundError(f"{name} is hidden", name=name)

    def guarded_module(name: str, package: str | None = None) -> Any:
        check(name)
        return import_module(name, package)

    def guarded_statement(name: str, *args: Any, **kwargs: Any) -> Any:
        check(name)
        return statement(name, *args, **kwargs)

    importlib.import_module = guarded_module
    builtins.__import__ = guarded_statement


def resolved(path: str) -> Any:
    """The object of a dotted name: as many modules as there are, then attributes.

    Raises:
        AttributeError, ImportError: there is none.
    """
    parts = path.split(".")
    value: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        name = ".".join(parts[:number])
        try:
            value = sys.modules[name] if name in sys.modules else getattr(value, part)
        except AttributeError:
            value = importlib.import_module(name)
    return value


def _is_there(path: str) -> bool:
    with contextlib.suppress(AttributeError, ImportError):
        resolved(path)
        return True
    with contextlib.suppress(AttributeError, ImportError):
        return isinstance(resolved(path.rpartition(".")[0]), type)  # in its instances
    return False


def imported(planted: Mapping[str, str] | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """Import every module of isoshard.

    Args:
        planted: the source of some that are run in their place, by name.

    Returns:
        Those that fail, with the end of the traceback; those that need what is not installed.
    """
    failed, missing = {}, {}
    planted = planted or {}
    for name in planted or itertools.chain(FIRST, _names()):
        try:
            if name in planted:
                exec(planted[name], {"__name__": name})
            else:
                importlib.import_module(name)
        except ModuleNotFoundError as error:
            root = (error.name or "isoshard").partition(".")[0]
            if root == "isoshard" or root in sys.modules:
                failed[name] = traceback.format_exc(-6)
            else:
                missing[name] = root
        except Exception:
            failed[name] = traceback.format_exc(-6)
    return failed, missing


def _names() -> Iterator[str]:
    """The modules of isoshard, by the folders of its packages."""
    for package in ROOMS:  # an editable installation has each in a folder of its own
        paths = getattr(sys.modules.get(package), "__path__", ())
        for module in pkgutil.walk_packages(paths, f"{package}.", lambda name: None):
            if not module.name.startswith(SKIPPED) and not module.name.endswith("__main__"):
                yield module.name


def _result(use: Any) -> str:
    from isoshard.core.errors import PrivateNameError

    try:
        return repr(use())
    except PrivateNameError as error:
        return f"PrivateNameError: {error}"
    except Exception:
        return traceback.format_exc(-8)


def _sharded() -> Any:
    import jax.numpy as jnp

    import isoshard as iso

    mesh = iso.make_mesh((2,), ("x",))
    return iso.shard(jnp.ones(2), mesh, ("x",)).tolist()


def _added() -> Any:
    import torch

    import isoshard.torch_bridge  # noqa: F401

    return (torch.ones(2, device="jax") + 1).tolist()


def _rows() -> Iterator[Any]:
    """Every row of the tables that were imported."""
    for package in TABLES:
        yield from getattr(sys.modules.get(package), "NAMES", ())


def _bound() -> dict[str, list[Any]]:
    """What modules of the tables have for each path: what raises, or rows that are looked up."""
    from isoshard.core.runtime.private_names import Absent, PrivateName

    uses: dict[str, list[Any]] = collections.defaultdict(list)
    for module in [sys.modules[name] for name in sys.modules if name.startswith(TABLES)]:
        values = list(vars(module).values())
        for value in (*values, *(v for v in values if isinstance(v, dict) for v in v.values())):
            if isinstance(value, PrivateName):
                uses[value.path].append(value.resolve)
            elif isinstance(getattr(value, "__self__", None), PrivateName):  # `row.of`
                uses[value.__self__.path].append(functools.partial(value, object()))
            elif type(value) is Absent:
                uses[value.of].append(value)
    return uses


def _use(row: Any, uses: list[Any]) -> str:
    """Use what is bound to a row whose name is hidden."""
    from isoshard.core.errors import PrivateNameError

    for use in uses:
        try:
            use()
        except PrivateNameError as error:
            if f" has no {row.path}, which " not in str(error):
                return f"PrivateNameError of another name: {error}"
        except Exception:
            return traceback.format_exc(-4)
        else:
            return f"{use!r}: it can be called"
    return "raises" if uses else "substitute" if row.substitute else "is not hidden"


def rows() -> list[PrivateName]:
    """Every row of all tables, by path."""
    every: list[PrivateName] = []
    for name in TABLES:
        table: Any = importlib.import_module(name)
        for module in pkgutil.iter_modules(getattr(table, "__path__", ())):
            importlib.import_module(f"{name}.{module.name}")
        every += table.NAMES
    return sorted(every, key=lambda row: row.path)


def modules(of: Iterable[PrivateName]) -> list[str]:
    """The private and undocumented modules that rows are in; not those that torch is made of."""
    names = {
        ".".join(parts[:end])
        for row in of
        for parts in [row.path.split(".")]
        for end in range(2, len(parts) + 1)
    }
    private = [
        name
        for name in names
        if any(map(private_names.is_private, name.split(".")))
        or private_names.is_undocumented(name)
    ]
    return sorted(
        name
        for name in private
        if not name.startswith(("torch._C", "lightning.")) and private_names.is_module(name)
    )


def is_needed(row: PrivateName) -> bool:
    """Whether a row says that nothing is added to a tensor on `jax` without it."""
    return any(words in row.without for words in NOT_ADDED)


def faults(outcome: Outcome, wanted: Sequence[PrivateName], module: bool = False) -> list[str]:
    """What is wrong in a process without some names.

    Args:
        outcome: of that process.
        wanted: the rows whose names are hidden.
        module: whether their modules are; what an instance carries is there for all that.

    Returns:
        A line or more for each fault; none if all is well.
    """
    lines = [f"{name} cannot be imported:\n{error}" for name, error in outcome.failed.items()]
    hidden = set(outcome.hidden)  # less what the installed versions do not have anyway
    gone = [row.path for row in wanted if module or {row.path, row.formerly} & hidden]
    lines += [
        f"{path} is in no table that was imported" for path in gone if path not in outcome.uses
    ]
    if wanted and not hidden:
        lines.append(f"none of {[row.path for row in wanted]} is there to be hidden")
    right = ("raises", "substitute") + (("is not hidden", "it can be called") if module else ())
    lines += [f"{path}: {use}" for path, use in outcome.uses.items() if not use.endswith(right)]
    if outcome.sharded != "[1.0, 1.0]":
        lines.append(f"an array is not sharded: {outcome.sharded}")
    raising = [row for row in wanted if outcome.uses.get(row.path) == "raises"]
    needed = [row.path for row in raising if is_needed(row)]
    if not needed and outcome.added != "[2.0, 2.0]":
        lines.append(f"a tensor is not computed with: {outcome.added}")
    if needed and not outcome.added.startswith("PrivateNameError"):
        lines.append(f"without {needed[0]} something is added to a tensor: {outcome.added}")
    return lines


def main(names: Sequence[str]) -> int:
    """Hide each name alone and print what is wrong; returns how many cost too much."""
    every = rows()
    jobs = [(row.path, [row], False) for row in every if row.path not in UNHIDDEN]
    for name in modules(every):
        inside = [row for row in every if row.path.startswith(f"{name}.") or row.path == name]
        jobs.append((name, inside, True))
    if unknown := set(names) - {name for name, _, _ in jobs}:
        raise SystemExit(f"no row or module of the tables is called {', '.join(sorted(unknown))}")
    server, failed = Server(), 0
    for name, wanted, module in jobs:
        if names and name not in names:
            continue
        outcome = server.without([name] if module else names_of(wanted))
        if not outcome.hidden:
            print(f"absent {name}: the installed versions do not have it", flush=True)
            continue
        wrong = faults(outcome, wanted, module)
        failed += bool(wrong)
        print("\n".join([f"{'failed' if wrong else 'passed'} {name}", *wrong]), flush=True)
    server.close()
    return failed


def names_of(wanted: Iterable[PrivateName]) -> list[str]:
    """What is hidden for some rows: their paths, and those in older versions."""
    return [name for row in wanted for name in (row.path, row.formerly) if name]


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        sys.exit(min(main(sys.argv[1:]), 1))
