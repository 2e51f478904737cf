"""A recorded torch function with its equal layers as loops (`jax_function(.., repeat="auto")`).

The traced program becomes another one of the same inputs: arrays of equal layers are stacked, and
a `jax.lax.scan` runs over them. For the derivative the forward and the backward pass are traced as
one program, whose loops pass residuals to each other in stacks, and which is then split in two.
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
    """The sharding of an operand under Auto axes; None if it is unknown.

    Args:
        value: an array or a tracer.
        typed: its sharding on a mesh with Explicit axes, if it has one.
    """
    if typed is None and not isinstance(value, Tracer):
        typed = value.sharding if isinstance(value.sharding, NamedSharding) else None
    return None if typed is None else NamedSharding(auto(typed.mesh), P(*typed.spec))


class RolledProgram:
    """A program with its equal layers as loops.

    Args:
        inner: the program.
        repeat: "auto" makes no loops that would copy too much on JAX's default devices.
        layouts: the sharding of each operand. Loops are sharded as the unrolled layers are, by
            these and by constraints.
    """

    def __init__(self, inner: Program, repeat: Repeat, layouts: Layouts):
        """See the class."""
        self._inner, self._repeat, self._layouts = inner, repeat, layouts
        self._linears: dict[tuple[int, ...], Derivative] = {}

    def __call__(self, *operands: Any) -> list[Any]:
        """The results."""
        program = jax.make_jaxpr(lambda *arrays: self._inner(*arrays))(*operands)
        return list(_rolled_values(program, operands, self._repeat, self._layouts))

    def linear(self, which: tuple[int, ...]) -> Derivative:
        """The derivative with respect to some operands."""
        if which not in self._linears:
            inner = self._inner.linear(which)
            self._linears[which] = RolledDerivative(inner, self._repeat, self._layouts)
        return self._linears[which]

    def spread(self, index: int, tangent: ArrayLike) -> Any:
        """As of the program."""
        return self._inner.spread(index, tangent)


class RolledDerivative:
    """Forward and backward pass with loops.

    Args:
        inner: both, unrolled.
        repeat: see `RolledProgram`.
        layouts: likewise.
    """

    def __init__(self, inner: Derivative, repeat: Repeat, layouts: Layouts):
        """See the class."""
        self._inner, self._repeat, self._layouts = inner, repeat, layouts
        self.count, self.which, self.with_cotangent = inner.count, inner.which, inner.with_cotangent
        self._programs: tuple[Any, Any] | None = None

    def forward(self, *operands: Any) -> tuple[list[Any], list[Any]]:
        """The results, and the residuals."""
        if self._programs is None:
            self._programs = self._split(list(map(jax.typeof, operands)))
        outputs = self._programs[0](*operands)
        return outputs[: self._count], outputs[self._count :]

    def backward(
        self, operands: Sequence[Any], residuals: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """The cotangents of the operands `which`."""
        assert self._programs is not None
        return self._programs[1](*cotangents, *residuals)

    @property
    def vjp(self) -> Program:
        """The unrolled VJP."""
        return self._inner.vjp

    def _split(self, types: list[Any]) -> tuple[Any, Any]:
        inner = self._inner
        results = jax.eval_shape(lambda *operands: inner.forward(*operands)[0], *types)
        self._count = len(results)
        cotangents = [results[index] for index in inner.with_cotangent]

        def both(*inputs: Any) -> list[Any]:
            operands, cotangents = inputs[: len(types)], inputs[len(types) :]
            results, residuals = inner.forward(*operands)
            return [*results, *inner.backward(operands, residuals, cotangents)]

        program = jax.make_jaxpr(both)(*types, *cotangents)
        layouts = [*self._layouts, *[None] * len(cotangents)]
        loops = jax.make_jaxpr(
            lambda *inputs: _rolled_values(program, inputs, self._repeat, layouts)
        )(*types, *cotangents)
        return _split_program(loops, len(types), self._count)


def _split_program(program: ClosedJaxpr, first: int, results: int) -> tuple[Any, Any]:
    """A program as two functions: of its `first` inputs, and of the others.

    Returns:
        The first function, which returns those results and then the residuals; and the second,
        which takes the other inputs and then the residuals.
    """
    jaxpr = opened(program)
    inputs, others = jaxpr.invars[:first], jaxpr.invars[first:]
    late = set(others)
    before, after = [], []
    for equation in jaxpr.eqns:
        is_late = any(var in late for var in equation.invars if not isinstance(var, Literal))
        (after if is_late else before).append(equation)
        if is_late:
            late.update(equation.outvars)
    needed: dict[Any, None] = {}
    for var in (*(var for equation in after for var in equation.invars), *jaxpr.outvars[results:]):
        if not isinstance(var, Literal) and var not in late:
            needed[var] = None
    residuals = [var for var in needed if var not in jaxpr.constvars]
    run = function_of([*jaxpr.constvars, *inputs], [*jaxpr.outvars[:results], *residuals], before)
    back = function_of([*jaxpr.constvars, *others, *residuals], jaxpr.outvars[results:], after)
    consts = list(program.consts)
    return (
        lambda *operands: list(run(*consts, *operands)),
        lambda *operands: list(back(*consts, *operands)),
    )


def _rolled_values(
    program: ClosedJaxpr, inputs: Sequence[Any], repeat: Repeat, layouts: Layouts
) -> Sequence[Any]:
    """The results of a traced program, computed with its equal layers as loops.

    Args:
        program: of all `inputs`. If it has no equal layers, it is computed as it is, and the
            metrics say why.
        inputs: arrays and tracers.
        repeat: see `RolledProgram`.
        layouts: likewise.
    """
    rewritten = rolled(program, layouts=_layouts_between(program, layouts))
    where = metrics.user_location()
    reason = None
    if not rewritten.loops:
        reason = "; ".join(rewritten.reasons) or "no two layers are equal"
    elif repeat == "auto":
        reason = loop_copies(rewritten).too_many(jax.default_backend())
    if reason is not None:
        metrics.record_repeat(where, f"not rolled: {reason}")
        return jaxpr_as_fun(program)(*inputs)
    metrics.record_repeat(where, describe_loops(rewritten))
    stacked_inputs = [
        jnp.stack([inputs[index] for index in stack.indices])
        if stack.stacked
        else inputs[stack.indices[0]]
        for stack in rewritten.inputs
    ]
    results: dict[int, Any] = {}
    for stack, value in zip(
        rewritten.results, jaxpr_as_fun(rewritten.program)(*stacked_inputs), strict=True
    ):
        if stack.stacked:
            results.update((index, value[row]) for row, index in enumerate(stack.indices))
        else:
            results[stack.indices[0]] = value
    return [results[index] for index in range(len(results))]


def _layouts_between(
    program: ClosedJaxpr, layouts: Layouts
) -> Callable[[ClosedJaxpr], dict[Var, NamedSharding]] | None:
    """A function to the shardings of values between layers; None if no sharding is known.

    Inside `jax.shard_map` none is known: each device computes with blocks of its own.
    """
    constraints = [
        eqn.params["sharding"]
        for eqn in equations(program)
        if eqn.primitive.name == "sharding_constraint"
    ]
    shardings = [layout for layout in (*layouts, *constraints) if isinstance(layout, NamedSharding)]
    if (
        not shardings
        or not all(isinstance(constraint, NamedSharding) for constraint in constraints)
        or manual_axes()
    ):
        return None
    mesh = auto(shardings[0].mesh)
    if mesh.size == 1 or not all(same_grid(mesh, sharding.mesh) for sharding in shardings):
        return None
    return lambda program: spread_shardings(program, mesh, layouts)
