"""A traced torch function with its equal layers as loops (`jax_function(.., repeat="auto")`).

What JAX has traced becomes another program of the same inputs: arrays of equal layers are stacked,
and a `jax.lax.scan` runs over them. JAX differentiates that loop, so its gradient is one as well. A
`torch.autograd.Function` is a `jax.custom_vjp` in the program, and stays one inside the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from isoshard.core.repeats.rolled_program import rolled
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.engine.capture.rolled_step import Repeat
from isoshard.torch_bridge.engine.compiling.loop_copies import loop_copies
from isoshard.torch_bridge.engine.compiling.rolled_plan import said

from .equal_rules import with_equal_rules


def rolled_values(program: ClosedJaxpr, inputs: Sequence[Any], repeat: Repeat) -> Sequence[Any]:
    """What a traced program computes, with its equal layers as loops.

    Args:
        program: of all `inputs`. If it has no equal layers, it is computed as it is, and the
            metrics say why.
        inputs: arrays and tracers.
        repeat: "auto" makes no loops that would copy too much on JAX's default devices.
    """
    if any(isinstance(one, Tracer) for one in program.consts):  # of a trace around this one
        closed, count = program, len(program.consts)

        def opened(*values: Any) -> Any:
            return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, values[:count]))(*values[count:])

        inputs = [*program.consts, *inputs]
        program = jax.make_jaxpr(opened)(*inputs)
    found = rolled(with_equal_rules(program), differentiated=True)
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
