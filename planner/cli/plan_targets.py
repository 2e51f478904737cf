"""The names of `isoshard plan script.py:step`: a step, its example arguments, a plan.

The script is imported, not run: its `__name__` is its file's name, so that code under
`if __name__ == "__main__":` does not run.
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

from .plan_strategies import PlanCommandError


@dataclasses.dataclass(frozen=True)
class Target:
    """A step to plan.

    Attributes:
        name: for titles.
        step: a function or a compiled step.
        args: example arguments.
        weights: the order of the axes of its weights, as of `Plan.tensor_parallel`.
        file: of the script; "" without one.
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
        args: likewise a function that returns them, or the arguments; None: `step.example_args`,
            or `example_args` in the step's module.

    Raises:
        PlanCommandError: there is no such file or name, importing it fails, or there are no
            arguments, or not those that the step takes.
    """
    step = named(text, "the step")
    if not callable(step):
        raise PlanCommandError(f"{text} is of type {type(step).__name__}, and not a step")
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
                "example_args in its module. Shapes are enough: jax.ShapeDtypeStruct, or tensors "
                "on torch's device 'meta'"
            )
        arguments = ()
    if callable(arguments):
        arguments = _called(arguments, args or "example_args")
    arguments = arguments if isinstance(arguments, tuple) else (arguments,)
    module_name, _, name = text.rpartition(":")
    _bound(text, step, arguments, args or "example_args")
    return Target(name, step, arguments, file=getattr(_module(module_name), "__file__", None) or "")


def _bound(text: str, step: Any, arguments: tuple[Any, ...], source: str) -> None:
    """Check that a step takes its arguments."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return  # it has no signature
    try:
        signature.bind(*arguments)
    except TypeError as error:
        kinds = ", ".join(type(argument).__name__ for argument in arguments)
        raise PlanCommandError(
            f"{text} takes ({', '.join(signature.parameters)}), and {source} returns ({kinds}): "
            f"{error}. Several arguments are a tuple"
        ) from None


def failure_in(error: BaseException, file: str) -> str:
    """An exception with the line of a file that raised it; "" if none of its lines did."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if frame.filename == file]
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
        raise PlanCommandError(f"{text} is of type {type(result).__name__}, and not a Plan")
    return result


def named(text: str, purpose: str) -> Any:
    """Import an object by name.

    Raises:
        PlanCommandError: there is no such object, or the import fails.
    """
    module_name, colon, name = text.rpartition(":")
    if not colon or not module_name or not name:
        raise PlanCommandError(f"{text!r} does not name {purpose}: write script.py:name")
    module = _module(module_name)
    for attribute in name.split("."):
        if not hasattr(module, attribute):
            names = [name for name in vars(module) if not name.startswith("_")]
            functions = [name for name in names if callable(getattr(module, name))] or names
            raise PlanCommandError(
                f"{module_name} has no {name!r}; it has {', '.join(functions[:12]) or 'nothing'}"
            )
        module = getattr(module, attribute)
    return module


def _module(name: str) -> ModuleType:
    return _of_file(Path(name).resolve(), name) if name.endswith(".py") else _of_name(name)


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
    user_frames = [frame for frame in frames if "importlib" not in frame.filename] or frames
    if not user_frames:
        return f"{type(error).__name__}: {error}"
    last = user_frames[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"


def _needed(function: Any) -> list[str]:
    """The names of a function's positional parameters without defaults."""
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
