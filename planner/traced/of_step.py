"""Any step as a traced step: by itself, by its framework's bridge, or as a JAX function.

The framework is determined without running the step: a step of torch names or holds tensors,
modules or optimizers; one of JAX does not. Nothing is imported for that: a bridge is loaded when an
object of its framework is met.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from isoshard.core.errors import ShardingError
from isoshard.core.frameworks import Framework, framework_of, framework_owning, require
from isoshard.core.plan import PlanError
from isoshard.core.traced.jax_steps import traced_jax_step
from isoshard.core.traced.source_lines import with_lines_of_calls
from isoshard.core.traced.traced_step import TracedStep

from .platform_programs import for_platform


def traced_step(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: Mesh,
    plan: Any = None,
    *,
    batch: Collection[str] | None = None,
    unplanned: bool = False,
) -> TracedStep:
    """Trace a step for a mesh and a plan, without data.

    Args:
        step: an object that has a method `traced_step` of its own, and `unplanned_step` if it has a
            plan as well; a step of a framework: its
            arguments, or what its code closes over or names, hold modules or tensors of it; or a
            JAX function.
        args: its arguments.
        kwargs: its keyword arguments.
        mesh: over devices that are here or described. Explicit axes are Auto ones but for JAX
            functions of arrays that have types on it, without a plan: a plan says where arrays lie,
            and the partitioner how what is computed of them does.
        plan: a `Plan`, one spec for every parameter, or None.
        batch: of a JAX function, the names of the arguments that are inputs.
        unplanned: whether a step that has a plan itself is traced without it, for other plans.

    Raises:
        PlanError: the plan does not fit, or is a text.
        ShardingError: `batch` is given, and the step is no JAX function.
        TypeError: the step is no function, or its arguments are not in a tuple or list.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from isoshard.planner.machine.topologies import topology
        >>> mesh = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
        >>> found = traced_step(jnp.sin, [jax.ShapeDtypeStruct((8,), "float32")], {}, mesh)
        >>> found.framework, len(found.program.eqns)
        ('jax', 1)
    """
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"args= is a tuple or list of the step's arguments, not {type(args).__name__}; of one "
            "argument write (x,)"
        )
    if isinstance(plan, str) and not plan.lstrip().startswith("{"):
        raise PlanError(
            f"plan={plan!r} is a text, and a plan is an object, such as "
            f"Plan.fsdp({mesh.axis_names[0]!r}), or one spec for every parameter, such as "
            f"P({mesh.axis_names[0]!r})"
        )
    own = getattr(step, "traced_step", None)
    if unplanned:
        own = getattr(step, "unplanned_step", own)
    framework = None if own is not None else framework_of_step(step, args, kwargs)
    if batch is not None and (own is not None or framework is not None):
        raise ShardingError(
            f"batch={tuple(batch)!r} is for a JAX function; a step of "
            f"{framework.name if framework else type(step).__name__} says itself what its inputs "
            "are: leave it out"
        )
    if own is not None:
        result = own(tuple(args), dict(kwargs), mesh, plan)
    elif framework is not None:
        result = framework.traced_step(step, tuple(args), dict(kwargs), mesh, plan)
    elif not callable(step):
        raise TypeError(f"a step is a function, a module or a model, not {type(step).__name__}")
    else:
        result = traced_jax_step(step, args, kwargs, mesh, plan, batch=batch)
    program = for_platform(result.program, mesh.devices.flat[0].platform)
    return dataclasses.replace(result, program=with_lines_of_calls(program))


def framework_of_step(
    step: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Framework | None:
    """Find the framework that a step is written in; nothing runs, and none is loaded needlessly.

    It is that of the first array, module or optimizer among its arguments, behind its method or
    closure, or among the globals that its code names.

    Returns:
        The framework; None: JAX.

    Example:
        >>> framework_of_step(lambda x: x + 1, (np.zeros(3),)) is None
        True
    """
    hint: str | None = None
    for one in (*_held((*args, kwargs or {})), *_behind(step)):
        if isinstance(one, types.ModuleType):
            root = one.__name__.partition(".")[0]
            hint = root if root in _EAGER else hint
            continue
        framework = framework_of(one) or framework_owning(one)
        if framework is not None:
            return framework
    return None if hint is None else require(hint)


def _held(value: Any) -> Iterator[Any]:
    """What plain containers hold, at any depth; a module that is a pytree stays itself."""
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _held(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _held(one)
    else:
        yield value


_EAGER = ("torch",)
"""Of a function that calls these packages by name, and holds nothing else, it is known whose it
is."""
_DEPTH = 4
_MOST = 10_000


def _behind(step: Any) -> Iterator[Any]:
    """The objects that a step consists of and holds, itself first, nearest first."""
    pending: collections.deque[tuple[Any, int]] = collections.deque([(step, 0)])
    visited: set[int] = set()
    while pending and len(visited) < _MOST:
        one, depth = pending.popleft()
        if id(one) in visited or isinstance(one, _ATOMS):
            continue
        visited.add(id(one))
        yield one
        if depth < _DEPTH and not isinstance(one, type | types.ModuleType):
            pending += [(inner, depth + 1) for inner in _inside(one)]


_ATOMS = (str, bytes, int, float, complex, bool, type(None), np.ndarray, jax.Array)


def _inside(one: Any) -> Iterator[Any]:
    if isinstance(one, types.FunctionType):
        for cell in one.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                yield cell.cell_contents
        yield from one.__defaults__ or ()
        names = _names(one.__code__)
        yield from (one.__globals__[name] for name in names if name in one.__globals__)
    elif isinstance(one, functools.partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, Mapping):
        yield from list(one.values())
    elif isinstance(one, list | tuple | set | frozenset):
        yield from list(one)
    for name in ("__self__", "__func__", "__wrapped__"):
        held = getattr(one, name, None)
        if held is not None and not isinstance(held, type | types.ModuleType):
            yield held
    if not isinstance(one, types.FunctionType | types.MethodType):
        yield from list(getattr(one, "__dict__", {}).values())


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
