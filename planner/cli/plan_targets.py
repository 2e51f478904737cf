"""What `isoshard plan script.py:step` names: a step, its example arguments, a plan.

The script is imported, not run: its `__name__` is its file's name, so that what stands below
`if __name__ == "__main__":` stays out.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from isoshard.core.kit import Order, Plan

from .plan_words import PlanCommandError


@dataclasses.dataclass(frozen=True)
class Target:
    """What is planned.

    Attributes:
        name: for titles.
        step: a function or a compiled step.
        args: example arguments.
        weights: the order of the axes of its weights, as of `Plan.tensor_parallel`.
        file: of the script; "" if there is none.
    """

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    weights: Order = "out_in"
    file: str = ""


def target_of(text: str, args: str | None) -> Target:
    """Find a step and its arguments.

    Args:
        text: "script.py:step" or "package.module:step".
        args: likewise a function that makes them, or the arguments; None: `step.example_args`, or
            `example_args` beside the step.

    Raises:
        PlanCommandError: there is no such file or name, importing it fails, or there are no
            arguments, or not those that the step takes.
    """
    step = named(text, "the step")
    if not callable(step):
        raise PlanCommandError(f"{text} is of type {type(step).__name__}, and no step")
    if args is not None:
        arguments = named(args, "the arguments")
    else:
        arguments = getattr(step, "example_args", None)
        if arguments is None:
            arguments = getattr(_module(text.rpartition(":")[0]), "example_args", None)
    if arguments is None:
        needed = _needed(step)
        if needed:
            raise PlanCommandError(
                f"{text} takes {', '.join(needed)}, and there are no example arguments: give "
                f"--args {text.rpartition(':')[0]}:make_args, a function that returns them, or set "
                "example_args beside the step. Shapes do: jax.ShapeDtypeStruct, or tensors on "
                "torch's device 'meta'"
            )
        arguments = ()
    if callable(arguments):
        arguments = _called(arguments, args or "example_args")
    arguments = arguments if isinstance(arguments, tuple) else (arguments,)
    index, _, name = text.rpartition(":")
    _bound(text, step, arguments, args or "example_args")
    return Target(name, step, arguments, file=getattr(_module(index), "__file__", None) or "")


def _bound(text: str, step: Any, arguments: tuple[Any, ...], source: str) -> None:
    """Check that a step takes its arguments."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return  # it does not say what it takes
    try:
        signature.bind(*arguments)
    except TypeError as error:
        kinds = ", ".join(type(argument).__name__ for argument in arguments)
        raise PlanCommandError(
            f"{text} takes ({', '.join(signature.parameters)}), and {source} gives ({kinds}): "
            f"{error}. Several arguments are a tuple"
        ) from None


def failure_in(error: BaseException, file: str) -> str:
    """What an exception says that code of a file raised, or called; "" if it did not."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == file]
    if not file or not frames:
        return ""
    last = frames[-1]
    return f"{Path(file).name}:{last.lineno} ({last.name}): {type(error).__name__}: {error}"


def plan_named(text: str, mesh: Any) -> Plan:
    """Find a plan in a script.

    Raises:
        PlanCommandError: there is none.
    """
    result = named(text, "the plan")
    if not isinstance(result, Plan) and callable(result):
        result = _called(result, text, *([mesh] if _needed(result) else []))
    if not isinstance(result, Plan):
        raise PlanCommandError(f"{text} is of type {type(result).__name__}, and no Plan")
    return result


def named(text: str, what: str) -> Any:
    """Import what a text names.

    Raises:
        PlanCommandError: it is not there, or importing it fails.
    """
    index, colon, name = text.rpartition(":")
    if not colon or not index or not name:
        raise PlanCommandError(f"{text!r} does not name {what}: write script.py:name")
    module = _module(index)
    for chunk in name.split("."):
        if not hasattr(module, chunk):
            names = [var for var in vars(module) if not var.startswith("_")]
            own = [one for one in names if callable(getattr(module, one))] or names
            raise PlanCommandError(
                f"{index} has no {name!r}; it has {', '.join(own[:12]) or 'nothing'}"
            )
        module = getattr(module, chunk)
    return module


def _module(index: str) -> ModuleType:
    return _of_file(Path(index).resolve(), index) if index.endswith(".py") else _of_name(index)


@functools.cache
def _of_file(path: Path, written: str) -> ModuleType:
    if not path.is_file():
        raise PlanCommandError(f"there is no file {written!r}")
    name = f"planned_{path.stem}" if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PlanCommandError(f"{written!r} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name)
        raise PlanCommandError(f"importing {path.name} fails: {_where(error)}") from error
    return module


def _of_name(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise PlanCommandError(f"importing {name} fails: {_where(error)}") from error
        raise PlanCommandError(
            f"there is no module {name!r}; of a file, write its path: script.py:step"
        ) from None
    except Exception as error:
        raise PlanCommandError(f"importing {name} fails: {_where(error)}") from error


def _called(function: Callable[..., Any], name: str, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        raise PlanCommandError(f"{name} fails: {_where(error)}") from error


def _where(error: BaseException) -> str:
    """An error with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename] or frames
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def _needed(function: Any) -> list[str]:
    """The arguments that a call has to give."""
    try:
        needed: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    return [
        name
        for name, one in needed.items()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
