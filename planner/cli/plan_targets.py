"""What `isoshard plan script.py:step` names: a step, its example arguments, a plan.

The script is imported, not run: its `__name__` is its file's name, so that the block of
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

from isoshard.core.plan import Plan
from isoshard.core.plan.layout_rules import Order

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
        args: the name of a function that returns them, or of the arguments; None:
            `step.example_args`, or `example_args` in the step's module.

    Raises:
        PlanCommandError: there is no such file or name, importing it fails, or there are no
            arguments, or not those that the step takes.
    """
    step = named(text, "the step")
    if not callable(step):
        raise PlanCommandError(f"{text} is of type {type(step).__name__}, and no step")
    if args is not None:
        step_args = named(args, "the arguments")
    else:
        step_args = getattr(step, "example_args", None)
        if step_args is None:
            step_args = getattr(_module(text.rpartition(":")[0]), "example_args", None)
    if step_args is None:
        needed = _needed(step)
        if needed:
            raise PlanCommandError(
                f"{text} takes {', '.join(needed)}, and there are no example arguments: give "
                f"--args {text.rpartition(':')[0]}:make_args, a function that returns them, or set "
                "example_args in the step's module. Shapes do: jax.ShapeDtypeStruct, or tensors on "
                "torch's device 'meta'"
            )
        step_args = ()
    if callable(step_args):
        step_args = _called(step_args, args or "example_args")
    step_args = step_args if isinstance(step_args, tuple) else (step_args,)
    file, _, name = text.rpartition(":")
    _bound(text, step, step_args, args or "example_args")
    return Target(name, step, step_args, file=getattr(_module(file), "__file__", None) or "")


def _bound(text: str, step: Any, args: tuple[Any, ...], source: str) -> None:
    """Check that a step takes its arguments."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return  # it has no signature
    try:
        signature.bind(*args)
    except TypeError as error:
        kinds = ", ".join(type(arg).__name__ for arg in args)
        raise PlanCommandError(
            f"{text} takes ({', '.join(signature.parameters)}), and {source} gives ({kinds}): "
            f"{error}. Several arguments are a tuple"
        ) from None


def failure_in(error: BaseException, file: str) -> str:
    """The message of an exception that code of a file raised or called into; "" otherwise.

    Args:
        error: the exception.
        file: the path of a script.
    """
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file
    ]
    if not file or not frames:
        return ""
    last = frames[-1]
    return f"{Path(file).name}:{last.lineno} ({last.name}): {type(error).__name__}: {error}"


def plan_named(text: str, mesh: Any) -> Plan:
    """Find a plan in a script.

    Args:
        text: "script.py:my_plan": a `Plan`, or a function that makes one, without arguments or of
            the mesh.
        mesh: the argument of a function.

    Raises:
        PlanCommandError: there is none.
    """
    plan = named(text, "the plan")
    if not isinstance(plan, Plan) and callable(plan):
        plan = _called(plan, text, *([mesh] if _needed(plan) else []))
    if not isinstance(plan, Plan):
        raise PlanCommandError(f"{text} is of type {type(plan).__name__}, and no Plan")
    return plan


def named(text: str, label: str) -> Any:
    """Import what a text names.

    Args:
        text: file or module, a colon, a name.
        label: what it is, for messages.

    Raises:
        PlanCommandError: it is not there, or importing it fails.
    """
    module_text, colon, name = text.rpartition(":")
    if not colon or not module_text or not name:
        raise PlanCommandError(f"{text!r} does not name {label}: write script.py:name")
    value = _module(module_text)
    for attribute in name.split("."):
        if not hasattr(value, attribute):
            names = [name_ for name_ in vars(value) if not name_.startswith("_")]
            callables = [name_ for name_ in names if callable(getattr(value, name_))] or names
            raise PlanCommandError(
                f"{module_text} has no {name!r}; it has {', '.join(callables[:12]) or 'nothing'}"
            )
        value = getattr(value, attribute)
    return value


def _module(text: str) -> ModuleType:
    return _of_file(Path(text).resolve(), text) if text.endswith(".py") else _of_name(text)


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
            f"there is no module {name!r}; for a file, write its path: script.py:step"
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
    location = (
        f" ({Path(user_frames[-1].filename).name}:{user_frames[-1].lineno})" if user_frames else ""
    )
    return f"{type(error).__name__}: {error}{location}"


def _needed(function: Any) -> list[str]:
    """The arguments that a call has to give."""
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
