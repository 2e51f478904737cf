"""Any step as a traced step: by itself, by its framework's bridge, or as a JAX function.

A step of torch refers to tensors, modules or optimizers; one of JAX does not. Nothing is imported
to decide: a bridge is loaded when an object of its framework is found.

`jax.lax.platform_dependent` puts every branch into the program, and lowering drops those of other
platforms. Flops and memory are counted before that, so the branches are dropped here.

>>> import jax
>>> def step(x):
...     return jax.lax.platform_dependent(x, cpu=jax.numpy.sin, default=lambda x: x * 2)
>>> program = jax.make_jaxpr(step)(1.0)
>>> [eqn.primitive.name for eqn in program.eqns]
['platform_index', 'cond']
>>> call = for_platform(program, "tpu").eqns[-1]
>>> call.params["call_jaxpr"].eqns[0].primitive.name
'mul'
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

from isoshard.core.kit import (
    Framework,
    JaxprRewriter,
    PlanError,
    ShardingError,
    TracedStep,
    closed_call_p,
    framework_of,
    framework_owning,
    require,
    traced_jax_step,
    with_lines_of_calls,
)


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
        step: an object with a method `traced_step`, and `unplanned_step` if it has a plan as well;
            a step of a framework, whose arguments, closure or globals hold modules or tensors of
            it; or a JAX function.
        args: its arguments.
        kwargs: its keyword arguments.
        mesh: over attached or described devices. Explicit axes are Auto ones except for JAX
            functions of arrays that have types on it, without a plan: a plan decides the shardings
            of arrays, and the partitioner those of values computed from them.
        plan: a `Plan`, one spec for every parameter, or None.
        batch: of a JAX function, the names of the arguments that are inputs.
        unplanned: whether a step that has a plan itself is traced without it, for other plans.

    Raises:
        PlanError: the plan does not fit, or is a text.
        ShardingError: `batch` is given, and the step is not a JAX function.
        TypeError: the step is not a function, or its arguments are not in a tuple or list.

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
            f"args= must be a tuple or list of the step's arguments, not {type(args).__name__}; "
            "for one argument write (x,)"
        )
    if isinstance(plan, str) and not plan.lstrip().startswith("{"):
        raise PlanError(
            f"plan={plan!r} is a text, and a plan is an object, such as "
            f"Plan.fsdp({mesh.axis_names[0]!r}), or one spec for every parameter, such as "
            f"P({mesh.axis_names[0]!r})"
        )
    method = getattr(step, "traced_step", None)
    if unplanned:
        method = getattr(step, "unplanned_step", method)
    framework = None if method is not None else framework_of_step(step, args, kwargs)
    if batch is not None and (method is not None or framework is not None):
        raise ShardingError(
            f"batch={tuple(batch)!r} is for a JAX function; a step of "
            f"{framework.name if framework else type(step).__name__} declares its inputs: leave "
            "batch= out"
        )
    if method is not None:
        result = method(tuple(args), dict(kwargs), mesh, plan)
    elif framework is not None:
        result = framework.traced_step(step, tuple(args), dict(kwargs), mesh, plan)
    elif not callable(step):
        raise TypeError(f"step must be a function, a module or a model, not {type(step).__name__}")
    else:
        result = traced_jax_step(step, args, kwargs, mesh, plan, batch=batch)
    program = for_platform(result.program, mesh.devices.flat[0].platform)
    return dataclasses.replace(result, program=with_lines_of_calls(program))


def framework_of_step(
    step: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Framework | None:
    """Find the framework of a step, without running it and without loading other frameworks.

    It is that of the first array, module or optimizer among its arguments, in its method's object
    or closure, or among the globals that its code names.

    Returns:
        The framework; None: JAX.

    Example:
        >>> framework_of_step(lambda x: x + 1, (np.zeros(3),)) is None
        True
    """
    hint: str | None = None
    for candidate in (*_leaves((*args, kwargs or {})), *_reachable(step)):
        if isinstance(candidate, types.ModuleType):
            root = candidate.__name__.partition(".")[0]
            hint = root if root in _EAGER else hint
            continue
        framework = framework_of(candidate) or framework_owning(candidate)
        if framework is not None:
            return framework
    return None if hint is None else require(hint)


def _leaves(value: Any) -> Iterator[Any]:
    """The leaves of plain containers, at any depth; a module that is a pytree is a leaf."""
    if isinstance(value, Mapping):
        for element in value.values():
            yield from _leaves(element)
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _leaves(element)
    else:
        yield value


_EAGER = ("torch",)
"""Frameworks of a function that only calls their package by name."""


_DEPTH = 4


_MOST = 10_000


def _reachable(step: Any) -> Iterator[Any]:
    """The objects that a step refers to, the step first, in breadth-first order."""
    pending: collections.deque[tuple[Any, int]] = collections.deque([(step, 0)])
    visited: set[int] = set()
    while pending and len(visited) < _MOST:
        node, depth = pending.popleft()
        if id(node) in visited or isinstance(node, _ATOMS):
            continue
        visited.add(id(node))
        yield node
        if depth < _DEPTH and not isinstance(node, type | types.ModuleType):
            pending += [(inner, depth + 1) for inner in _referenced(node)]


_ATOMS = (str, bytes, int, float, complex, bool, type(None), np.ndarray, jax.Array)


def _referenced(node: Any) -> Iterator[Any]:
    if isinstance(node, types.FunctionType):
        for cell in node.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                yield cell.cell_contents
        yield from node.__defaults__ or ()
        names = _names(node.__code__)
        yield from (node.__globals__[name] for name in names if name in node.__globals__)
    elif isinstance(node, functools.partial):
        yield from (node.func, *node.args, *node.keywords.values())
    elif isinstance(node, Mapping):
        yield from list(node.values())
    elif isinstance(node, list | tuple | set | frozenset):
        yield from list(node)
    for name in ("__self__", "__func__", "__wrapped__"):
        inner = getattr(node, name, None)
        if inner is not None and not isinstance(inner, type | types.ModuleType):
            yield inner
    if not isinstance(node, types.FunctionType | types.MethodType):
        yield from list(getattr(node, "__dict__", {}).values())


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


_LOWERED = {"gpu": "cuda"}
"""A device's platform -> its name in JAX's lowering, where they differ."""


def for_platform(program: Any, platform: str) -> Any:
    """The jaxpr with only the platform's branch of `platform_dependent`, at any depth.

    Returns:
        A jaxpr of the same kind, which calls the branch. Without a branch for the platform the
        equation remains, and raises when it is lowered. The argument is not changed.
    """
    return _PlatformBranch(_LOWERED.get(platform, platform)).program(program)


class _PlatformBranch(JaxprRewriter):
    def __init__(self, platform: str) -> None:
        super().__init__()
        self._platform = platform

    def equation(self, eqn: Any, context: Any) -> Iterator[Any]:
        eqn = self.inside(eqn, context)
        if eqn.primitive.name == "cond":
            params = eqn.params
            platforms = params.get("branches_platforms") or ()
            for branch, names in zip(params["branches"], platforms, strict=bool(platforms)):
                if names is None or self._platform in names:
                    yield eqn.replace(
                        primitive=closed_call_p,
                        invars=eqn.invars[1:],
                        params={"call_jaxpr": branch},
                        effects=branch.effects,
                    )
                    return
        yield eqn
