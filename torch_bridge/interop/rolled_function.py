"""A traced torch function with its equal layers as loops (`jax_function(.., repeat="auto")`).

What JAX has traced becomes another program of the same inputs: arrays of equal layers are stacked,
and a `jax.lax.scan` runs over them. JAX differentiates that loop, so its gradient is one as well. A
`torch.autograd.Function` is a `jax.custom_vjp` in the program, and stays one inside the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.axis_types import auto, same_grid
from isoshard.core.layout.in_shard_map import manual_axes
from isoshard.core.planner.axes.border_layouts import spread_layouts
from isoshard.core.repeats.rolled_program import rolled
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr, Var, jaxpr_as_fun
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.jaxprs import closed, equations, opened
from isoshard.torch_bridge.engine.capture.rolled_step import Repeat
from isoshard.torch_bridge.engine.compiling.loop_copies import loop_copies
from isoshard.torch_bridge.engine.compiling.rolled_plan import said

from .equal_rules import with_equal_rules


def rolled_values(
    program: ClosedJaxpr,
    inputs: Sequence[Any],
    repeat: Repeat,
    types: Sequence[NamedSharding | None],
) -> Sequence[Any]:
    """What a traced program computes, with its equal layers as loops.

    Args:
        program: of all `inputs`. If it has no equal layers, it is computed as it is, and the
            metrics say why.
        inputs: arrays and tracers.
        repeat: "auto" makes no loops that would copy too much on JAX's default devices.
        types: of each input its layout on a mesh with Explicit axes. Loops lie as the layers do
            that are written out, by these, by layouts of arrays that are not traced, and by
            constraints. Under Auto axes JAX does not say how a traced input lies.
    """
    lies = [_layout(*pair) for pair in zip(inputs, types, strict=True)]
    if any(isinstance(one, Tracer) for one in program.consts):  # of a trace around this one
        jaxpr, count = opened(program), len(program.consts)

        def with_constants(*values: Any) -> Any:
            return jaxpr_as_fun(closed(jaxpr, values[:count]))(*values[count:])

        inputs = [*program.consts, *inputs]
        lies = [*[None] * count, *lies]
        program = jax.make_jaxpr(with_constants)(*inputs)
    borders = _borders(program, lies)
    found = rolled(with_equal_rules(program), differentiated=True, layouts=borders)
    where = metrics.user_location()
    reason = None
    if not found.loops:
        reason = "; ".join(found.reasons) or "no two layers are equal"
    elif repeat == "auto":
        reason = loop_copies(found).too_many(jax.default_backend())
    if reason is not None:
        metrics.record_repeat(where, f"not rolled: {reason}")
        return jaxpr_as_fun(program)(*inputs)
    metrics.record_repeat(where, said(found))
    taken = [
        jnp.stack([inputs[number] for number in stack.numbers])
        if stack.stacked
        else inputs[stack.numbers[0]]
        for stack in found.inputs
    ]
    results: dict[int, Any] = {}
    for stack, value in zip(found.results, jaxpr_as_fun(found.program)(*taken), strict=True):
        if stack.stacked:
            results.update((number, value[place]) for place, number in enumerate(stack.numbers))
        else:
            results[stack.numbers[0]] = value
    return [results[number] for number in range(len(results))]


def _layout(value: Any, typed: NamedSharding | None) -> NamedSharding | None:
    """How an input lies, under Auto axes; None is not known."""
    if typed is None and not isinstance(value, Tracer):
        typed = value.sharding if isinstance(value.sharding, NamedSharding) else None
    return None if typed is None else NamedSharding(auto(typed.mesh), P(*typed.spec))


def _borders(
    program: ClosedJaxpr, lies: Sequence[NamedSharding | None]
) -> Callable[[ClosedJaxpr], dict[Var, NamedSharding]] | None:
    """What gives the layouts of values between layers; None if nothing is known of them.

    That is so in `jax.shard_map`, where each device computes with blocks of its own.
    """
    said = [
        one.params["sharding"]
        for one in equations(program)
        if one.primitive.name == "sharding_constraint"
    ]
    known = [one for one in (*lies, *said) if isinstance(one, NamedSharding)]
    if not known or not all(isinstance(one, NamedSharding) for one in said) or manual_axes():
        return None
    mesh = auto(known[0].mesh)
    if mesh.size == 1 or not all(same_grid(mesh, one.mesh) for one in known):
        return None
    return lambda program: spread_layouts(program, mesh, lies)
