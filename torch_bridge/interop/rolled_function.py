"""A recorded torch function with its equal layers as loops (`jax_function(.., repeat="auto")`).

What JAX traces becomes another program of the same inputs: arrays of equal layers are stacked, and
a `jax.lax.scan` runs over them. For the derivative the forward and the backward pass are traced as
one program, whose loops hand what they keep to each other in stacks, and which is cut in two
between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.extensions import spread_shardings
from isoshard.core.layout.axis_types import auto, same_grid
from isoshard.core.layout.in_shard_map import manual_axes
from isoshard.core.repeats.jaxpr_functions import function_of
from isoshard.core.repeats.rolled_program import rolled
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals.jaxpr_classes import (
    ClosedJaxpr,
    Literal,
    Var,
    jaxpr_as_fun,
)
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.differentiable_programs import Derivative, Program
from isoshard.core.runtime.jaxprs import equations, opened
from isoshard.torch_bridge.common.argument_types import ArrayLike
from isoshard.torch_bridge.engine.capture.assemble import Repeat
from isoshard.torch_bridge.engine.compiling.loop_copies import loop_copies
from isoshard.torch_bridge.engine.compiling.rolled_plan import describe_loops

Layouts = Sequence[NamedSharding | None]


def layout_of(value: ArrayLike, typed: NamedSharding | None) -> NamedSharding | None:
    """How an operand lies, under Auto axes; None is not known.

    Args:
        value: an array or a tracer.
        typed: its layout on a mesh with Explicit axes, if it has one.
    """
    if typed is None and not isinstance(value, Tracer):
        typed = value.sharding if isinstance(value.sharding, NamedSharding) else None
    return None if typed is None else NamedSharding(auto(typed.mesh), P(*typed.spec))


class RolledProgram:
    """A program with its equal layers as loops.

    Args:
        inner: the program.
        repeat: "auto" makes no loops that would copy too much on JAX's default devices.
        lies: of each operand its layout. Loops lie as the layers do that are written out, by these
            and by constraints.
    """

    def __init__(self, inner: Program, repeat: Repeat, lies: Layouts):
        """See the class."""
        self._inner, self._repeat, self._lies = inner, repeat, lies
        self._linears: dict[tuple[int, ...], Derivative] = {}

    def __call__(self, *operands: Any) -> list[Any]:
        """The results."""
        program = jax.make_jaxpr(lambda *given: self._inner(*given))(*operands)
        return list(_rolled_values(program, operands, self._repeat, self._lies))

    def linear(self, which: tuple[int, ...]) -> Derivative:
        """With respect to some operands."""
        if which not in self._linears:
            inner = self._inner.linear(which)
            self._linears[which] = RolledDerivative(inner, self._repeat, self._lies)
        return self._linears[which]

    def spread(self, index: int, tangent: ArrayLike) -> Any:
        """As of the program."""
        return self._inner.spread(index, tangent)


class RolledDerivative:
    """Forward and backward pass with loops.

    Args:
        inner: both as they are written out.
        repeat: see `RolledProgram`.
        lies: likewise.
    """

    def __init__(self, inner: Derivative, repeat: Repeat, lies: Layouts):
        """See the class."""
        self._inner, self._repeat, self._lies = inner, repeat, lies
        self.count, self.which, self.with_cotangent = inner.count, inner.which, inner.with_cotangent
        self._parts: tuple[Any, Any] | None = None

    def forward(self, *operands: Any) -> tuple[list[Any], list[Any]]:
        """The results, and what the backward pass takes."""
        if self._parts is None:
            self._parts = self._cut(list(map(jax.typeof, operands)))
        found = self._parts[0](*operands)
        return found[: self._count], found[self._count :]

    def backward(
        self, operands: Sequence[Any], residuals: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """The cotangents of the operands `which`."""
        assert self._parts is not None
        return self._parts[1](*cotangents, *residuals)

    @property
    def vjp(self) -> Program:
        """As it is written out."""
        return self._inner.vjp

    def _cut(self, types: list[Any]) -> tuple[Any, Any]:
        inner = self._inner
        results = jax.eval_shape(lambda *given: inner.forward(*given)[0], *types)
        self._count = len(results)
        slopes = [results[number] for number in inner.with_cotangent]

        def both(*given: Any) -> list[Any]:
            operands, slopes = given[: len(types)], given[len(types) :]
            found, kept = inner.forward(*operands)
            return [*found, *inner.backward(operands, kept, slopes)]

        program = jax.make_jaxpr(both)(*types, *slopes)
        lies = [*self._lies, *[None] * len(slopes)]
        loops = jax.make_jaxpr(lambda *given: _rolled_values(program, given, self._repeat, lies))(
            *types, *slopes
        )
        return _cut_program(loops, len(types), self._count)


def _cut_program(program: ClosedJaxpr, first: int, results: int) -> tuple[Any, Any]:
    """A program as two functions.

    Args:
        program: of constants too.
        first: how many inputs the first function has.
        results: how many results it gives, which depend on no other inputs.

    Returns:
        The first gives those results, and then the values that the second takes behind the other
        inputs.
    """
    jaxpr = opened(program)
    inputs, others = jaxpr.invars[:first], jaxpr.invars[first:]
    late = set(others)
    before, after = [], []
    for equation in jaxpr.eqns:
        is_late = any(one in late for one in equation.invars if not isinstance(one, Literal))
        (after if is_late else before).append(equation)
        if is_late:
            late.update(equation.outvars)
    needed: dict[Any, None] = {}
    for one in (*(one for equation in after for one in equation.invars), *jaxpr.outvars[results:]):
        if not isinstance(one, Literal) and one not in late:
            needed[one] = None
    kept = [one for one in needed if one not in jaxpr.constvars]
    run = function_of([*jaxpr.constvars, *inputs], [*jaxpr.outvars[:results], *kept], before)
    back = function_of([*jaxpr.constvars, *others, *kept], jaxpr.outvars[results:], after)
    values = list(program.consts)
    return (
        lambda *given: list(run(*values, *given)),
        lambda *given: list(back(*values, *given)),
    )


def _rolled_values(
    program: ClosedJaxpr, inputs: Sequence[Any], repeat: Repeat, lies: Layouts
) -> Sequence[Any]:
    """What a traced program computes, with its equal layers as loops.

    Args:
        program: of all `inputs`. If it has no equal layers, it is computed as it is, and the
            metrics say why.
        inputs: arrays and tracers.
        repeat: see `RolledProgram`.
        lies: likewise.
    """
    found = rolled(program, layouts=_borders(program, lies))
    where = metrics.user_location()
    reason = None
    if not found.loops:
        reason = "; ".join(found.reasons) or "no two layers are equal"
    elif repeat == "auto":
        reason = loop_copies(found).too_many(jax.default_backend())
    if reason is not None:
        metrics.record_repeat(where, f"not rolled: {reason}")
        return jaxpr_as_fun(program)(*inputs)
    metrics.record_repeat(where, describe_loops(found))
    taken = [
        jnp.stack([inputs[number] for number in stack.indices])
        if stack.stacked
        else inputs[stack.indices[0]]
        for stack in found.inputs
    ]
    results: dict[int, Any] = {}
    for stack, value in zip(found.results, jaxpr_as_fun(found.program)(*taken), strict=True):
        if stack.stacked:
            results.update((number, value[place]) for place, number in enumerate(stack.indices))
        else:
            results[stack.indices[0]] = value
    return [results[number] for number in range(len(results))]


def _borders(
    program: ClosedJaxpr, lies: Layouts
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
    return lambda program: spread_shardings(program, mesh, lies)
