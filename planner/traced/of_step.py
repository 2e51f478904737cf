"""Any step as a traced step: by itself, by its framework's bridge, or as a JAX function."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from isoshard.core.kit import (
    PlanError,
    ShardingError,
    TracedStep,
    traced_jax_step,
    with_lines_of_calls,
)

from .platform_programs import for_platform
from .whose_step import framework_of_step


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
