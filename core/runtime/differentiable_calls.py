"""Calls of programs that bring their own derivatives, of every order.

A `Program` computes results, and gives for each set of operands a `Derivative`: a forward pass that
keeps residuals, and a backward pass from them. JAX asks for no other derivative: the forward pass
stands in the trace as ordinary operations, so `jax.checkpoint` decides about each of its values;
the map of tangents is one operation, whose transposition is the backward pass. Derivatives of the
backward pass come from `Derivative.pullback`, a program again.

| operation | computes |
|---|---|
| `program_call` | the results |
| `program_results` | nothing: what the forward pass computed, with the program's derivative |
| `program_tangents` | tangents of the results, linear in those of the operands |
| `program_pullback` | cotangents of the operands, linear in those of the results |

The residuals are functions of the operands, so derivatives with respect to them are left to the
operands. No operation of a forward pass is differentiated by JAX, whose derivatives of lowerings
are others than the program's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ._jax_internals.jaxpr_classes import jaxpr_as_fun
from ._jax_internals.primitive_rules import Zero
from .batched_programs import AddedAxis, BatchedDerivative, BatchedProgram
from .differentiable_programs import Derivative, Program
from .primitives import new_primitive


def call(program: Program, *operands: Any) -> list[Any]:
    """Call a program; in a JAX trace as one operation.

    Args:
        program: what is called.
        *operands: arrays, one for each that it takes.
    """
    return _bound(program, operands)


def _bound(program: Program, operands: Sequence[Any]) -> list[Any]:
    """Bind with what the program computes, in which JAX looks for the devices of layouts."""
    if any(type(one).__name__ in _DIFFERENTIATED for one in operands):  # it is not asked for
        return _call.bind(*operands, program=program, jaxpr=None)
    jaxpr = jax.make_jaxpr(lambda *given: list(program(*given)))(*operands)
    return _call.bind(*operands, program=program, jaxpr=jaxpr)


_DIFFERENTIATED = ("JVPTracer", "LinearizeTracer")


def _run(*operands: Any, program: Program, jaxpr: Any) -> list[Any]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _effects(*, jaxpr: Any, **_: Any) -> Any:
    return frozenset() if jaxpr is None else jaxpr.effects


def _types(*_: Any, program: Program, jaxpr: Any) -> list[Any]:
    return list(jaxpr.out_avals)


def _jvp_of_call(
    primals: Sequence[Any], tangents: Sequence[Any], *, program: Program, jaxpr: Any
) -> tuple[list[Any], list[Any]]:
    which = _changing(tangents)
    if not which:
        results = _bound(program, primals)
        return results, list(map(_none, results))
    linear = program.linear(which)
    computed, residuals = linear.forward(*map(jax.lax.stop_gradient, primals))
    results = _attached(program, primals, computed)
    given = [program.spread(number, tangents[number]) for number in which]
    return results, _tangents_of(linear, primals, residuals, given, results)


def _attached(program: Program, operands: Sequence[Any], computed: Sequence[Any]) -> list[Any]:
    """What was computed without derivatives, as results that have the program's."""
    count, given = len(operands), [*operands, *computed]
    jaxpr = jax.make_jaxpr(lambda *given: list(given[count:]))(*given)
    return _results.bind(*given, program=program, count=count, jaxpr=jaxpr)


def _outcome(*given: Any, program: Program, count: int, jaxpr: Any) -> list[Any]:
    return list(given[count:])


def _jvp_of_results(
    primals: Sequence[Any], tangents: Sequence[Any], *, program: Program, count: int, jaxpr: Any
) -> tuple[list[Any], list[Any]]:
    _, changes = _jvp_of_call(primals[:count], tangents[:count], program=program, jaxpr=None)
    return _attached(program, primals[:count], primals[count:]), changes


def _batch_results(
    axis: Any, arrays: Sequence[Any], axes: Sequence[Any], *, program: Program, count: int, **_: Any
) -> Any:
    if _is_around(axis, axes, None):
        results = _attached(program, arrays[:count], arrays[count:])
        return results, [None] * len(results)
    mapped = tuple(one is not None for one in axes[:count])
    fronted = [_fronted(*pair) for pair in zip(arrays, axes, strict=True)]
    computed = [
        jnp.broadcast_to(one, (axis.size, *one.shape)) if at is None else one
        for one, at in zip(fronted[count:], axes[count:], strict=True)
    ]
    batched = BatchedProgram(program, mapped, AddedAxis.of(axis))
    results = _attached(batched, fronted[:count], computed)
    return results, [0] * len(results)


def _tangents_of(
    linear: Derivative,
    primals: Sequence[Any],
    residuals: Sequence[Any],
    given: Sequence[Any],
    results: Sequence[Any],
) -> list[Any]:
    slopes = tuple(jax.typeof(results[number]) for number in linear.with_slope)
    types = (slopes, tuple(map(jax.typeof, given)))
    found = _tangents.bind(*primals, *residuals, *given, linear=linear, types=types)
    tangents = dict(zip(linear.with_slope, found, strict=True))
    return [tangents[n] if n in tangents else _none(one) for n, one in enumerate(results)]


def _batch_call(
    axis: Any, arrays: Sequence[Any], axes: Sequence[Any], *, program: Program, jaxpr: Any
) -> Any:
    if _is_around(axis, axes, jaxpr):
        results = _bound(program, arrays)
        return results, [None] * len(results)
    fronted = [_fronted(*pair) for pair in zip(arrays, axes, strict=True)]
    batched = BatchedProgram(program, tuple(one is not None for one in axes), AddedAxis.of(axis))
    results = _bound(batched, fronted)
    return results, [0] * len(results)


def _is_around(axis: Any, axes: Sequence[Any], jaxpr: Any) -> bool:
    """Whether an axis is none of an operation's."""
    named = jaxpr is not None and any(getattr(e, "name", None) == axis.name for e in jaxpr.effects)
    return not named and all(one is None for one in axes)


def _split(operands: Sequence[Any], linear: Derivative, last: int) -> tuple[list[Any], ...]:
    operands = list(operands)
    end = len(operands) - last
    return operands[: linear.count], operands[linear.count : end], operands[end:]


def _expand(*operands: Any, linear: Derivative, types: Any) -> list[Any]:
    primals, residuals, given = _split(operands, linear, len(linear.which))
    return _transposed(lambda *slopes: linear.backward(primals, residuals, slopes), types, given)


def _transposed(pull: Any, types: Any, given: Sequence[Any]) -> list[Any]:
    """The map of tangents, from that of cotangents."""
    try:
        return list(jax.linear_transpose(pull, *types[0])(list(given)))
    except (NotImplementedError, ValueError, TypeError) as error:
        raise NotImplementedError(
            "forward-mode derivatives (jax.jvp, jax.jacfwd) of torch code are made from its "
            "backward, and the backward of this code is not linear in the gradient it is given (a "
            "hook or an autograd.Function that clips it?), or has an operation that JAX cannot "
            "transpose; take derivatives in reverse (jax.grad, jax.vjp, jax.jacrev)"
        ) from error


def _slopes(*_: Any, linear: Derivative, types: Any) -> list[Any]:
    return list(types[0])


def _transpose_tangents(slopes: Any, *operands: Any, linear: Derivative, types: Any) -> list[Any]:
    primals, residuals, _ = _split(operands, linear, len(linear.which))
    full = list(map(_full, slopes, types[0]))
    found = _bound_pullback(linear, types, [*primals, *residuals, *full])
    return [*[None] * (len(primals) + len(residuals)), *found]


def _bound_pullback(linear: Derivative, types: Any, operands: Sequence[Any]) -> list[Any]:
    def pull(*given: Any) -> list[Any]:
        return list(linear.backward(*_split(given, linear, len(types[0]))))

    jaxpr = jax.make_jaxpr(pull)(*operands)
    return _pullback.bind(*operands, linear=linear, types=types, jaxpr=jaxpr)


def _jvp_of_tangents(
    primals: Sequence[Any], tangents: Sequence[Any], *, linear: Derivative, types: Any
) -> tuple[list[Any], list[Any]]:
    operands, residuals, given = _split(primals, linear, len(linear.which))
    changes, _, changes_given = _split(tangents, linear, len(linear.which))
    results = _tangents.bind(*primals, linear=linear, types=types)
    found: list[Any] = []
    if any(not isinstance(one, Zero) for one in changes_given):
        full = list(map(_full, changes_given, types[1]))
        found = _tangents.bind(*operands, *residuals, *full, linear=linear, types=types)
    which = _changing(changes)
    if which:
        second = linear.pullback.linear(which)

        def pull(*slopes: Any) -> list[Any]:
            there = [*operands, *slopes]
            _, kept = second.forward(*map(jax.lax.stop_gradient, operands), *slopes)
            moved = [linear.pullback.spread(number, changes[number]) for number in which]
            return _expand(*there, *kept, *moved, linear=second, types=(types[1], ()))

        more = _transposed(pull, types, given)
        found = [a + b for a, b in zip(found, more, strict=True)] if found else more
    return results, found or list(map(_none, results))


def _batched(
    axis: Any, arrays: Any, axes: Any, linear: Derivative, types: Any, last: int
) -> tuple[Derivative, Any, list[Any]]:
    """A `Derivative` for many examples, its types and operands."""
    added = AddedAxis.of(axis)
    fronted = [_fronted(*pair) for pair in zip(arrays, axes, strict=True)]
    mapped = [one is not None for one in axes]
    operands, residuals, given = _split(fronted, linear, last)
    on, kept, moved = _split(mapped, linear, last)
    given = [
        one if is_mapped else jnp.broadcast_to(one, (added.size, *one.shape))
        for one, is_mapped in zip(given, moved, strict=True)
    ]
    batched = BatchedDerivative(linear, tuple(on), tuple(kept), added)
    longer = tuple(tuple(_longer(one, added.size) for one in some) for some in types)
    return batched, longer, [*operands, *residuals, *given]


def _batch_tangents(axis: Any, arrays: Any, axes: Any, *, linear: Derivative, types: Any) -> Any:
    if _is_around(axis, axes, None):
        results = _tangents.bind(*arrays, linear=linear, types=types)
        return results, [None] * len(results)
    linear, types, given = _batched(axis, arrays, axes, linear, types, len(linear.which))
    results = _tangents.bind(*given, linear=linear, types=types)
    return results, [0] * len(results)


def _pull(*operands: Any, linear: Derivative, types: Any, jaxpr: Any) -> list[Any]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _pulled(*_: Any, linear: Derivative, types: Any, jaxpr: Any) -> list[Any]:
    return list(types[1])


def _transpose_pullback(
    changes: Any, *operands: Any, linear: Derivative, types: Any, jaxpr: Any
) -> list[Any]:
    primals, residuals, _ = _split(operands, linear, len(types[0]))
    full = list(map(_full, changes, types[1]))
    found = _tangents.bind(*primals, *residuals, *full, linear=linear, types=types)
    return [*[None] * (len(primals) + len(residuals)), *found]


def _jvp_of_pullback(
    primals: Sequence[Any], tangents: Sequence[Any], *, linear: Derivative, types: Any, jaxpr: Any
) -> tuple[list[Any], list[Any]]:
    operands, _, slopes = _split(primals, linear, len(types[0]))
    changes, _, changes_of_slopes = _split(tangents, linear, len(types[0]))
    results = _bound_pullback(linear, types, primals)
    moved = [*changes, *changes_of_slopes]
    which = _changing(moved)
    if not which:
        return results, list(map(_none, results))
    program = linear.pullback
    second = program.linear(which)
    there = [*operands, *slopes]
    _, kept = second.forward(*map(jax.lax.stop_gradient, there))
    given = [program.spread(number, moved[number]) for number in which]
    return results, _tangents_of(second, there, kept, given, results)


def _batch_pullback(
    axis: Any, arrays: Any, axes: Any, *, linear: Derivative, types: Any, jaxpr: Any
) -> Any:
    if _is_around(axis, axes, jaxpr):
        results = _bound_pullback(linear, types, arrays)
        return results, [None] * len(results)
    linear, types, given = _batched(axis, arrays, axes, linear, types, len(types[0]))
    results = _bound_pullback(linear, types, given)
    return results, [0] * len(results)


def _fronted(array: Any, axis: Any) -> Any:
    return array if axis is None else jnp.moveaxis(array, axis, 0)


def _longer(aval: Any, size: int) -> Any:
    spread = NamedSharding(aval.sharding.mesh, P(None, *aval.sharding.spec))
    return aval.update(shape=(size, *aval.shape), sharding=spread)


def _changing(tangents: Sequence[Any]) -> tuple[int, ...]:
    return tuple(
        number
        for number, one in enumerate(tangents)
        if not isinstance(one, Zero) and getattr(one, "dtype", None) != jax.dtypes.float0
    )


def _full(slope: Any, aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype) if isinstance(slope, Zero) else slope


def _none(result: Any) -> Any:
    return Zero(jax.typeof(result).to_tangent_aval())


_call = new_primitive(
    "program_call",
    _run,
    _types,
    jvp=_jvp_of_call,
    named_batch=_batch_call,
    effects=_effects,
    several=True,
)
_results = new_primitive(
    "program_results",
    _outcome,
    _outcome,
    jvp=_jvp_of_results,
    named_batch=_batch_results,
    several=True,
)
_tangents = new_primitive(
    "program_tangents",
    _expand,
    _slopes,
    transpose=_transpose_tangents,
    jvp=_jvp_of_tangents,
    named_batch=_batch_tangents,
    several=True,
)
_pullback = new_primitive(
    "program_pullback",
    _pull,
    _pulled,
    transpose=_transpose_pullback,
    jvp=_jvp_of_pullback,
    named_batch=_batch_pullback,
    effects=_effects,
    several=True,
)
