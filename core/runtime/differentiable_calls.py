"""Calls of programs that bring their own derivatives, of every order.

A `Program` computes results, and gives for each set of operands a `Derivative`: a forward pass that
keeps residuals, and a backward pass from them. JAX needs no other derivative: the forward pass
stands in the trace as ordinary operations, so `jax.checkpoint` decides about each of its values;
the map of tangents is one operation, whose transposition is the backward pass. Derivatives of the
backward pass come from `Derivative.vjp`, a program again.

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
    """Call a program; in a JAX trace as one operation."""
    return _bound(program, operands)


def _bound(program: Program, operands: Sequence[Any]) -> list[Any]:
    """Bind with what the program computes, in which JAX looks for the devices of layouts."""
    # Tracers of a derivative do not look for it.
    if any(type(operand).__name__ in _DIFFERENTIATED for operand in operands):
        return _call.bind(*operands, program=program, jaxpr=None)
    jaxpr = jax.make_jaxpr(lambda *args: list(program(*args)))(*operands)
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
    spread = [program.spread(index, tangents[index]) for index in which]
    return results, _tangents_of(linear, primals, residuals, spread, results)


def _attached(program: Program, operands: Sequence[Any], computed: Sequence[Any]) -> list[Any]:
    """What was computed without derivatives, as results that have the program's."""
    count, values = len(operands), [*operands, *computed]
    jaxpr = jax.make_jaxpr(lambda *values: list(values[count:]))(*values)
    return _results.bind(*values, program=program, count=count, jaxpr=jaxpr)


def _outcome(*values: Any, program: Program, count: int, jaxpr: Any) -> list[Any]:
    return list(values[count:])


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
    mapped = tuple(axis is not None for axis in axes[:count])
    fronted = [_fronted(*pair) for pair in zip(arrays, axes, strict=True)]
    computed = [
        jnp.broadcast_to(value, (axis.size, *value.shape)) if at is None else value
        for value, at in zip(fronted[count:], axes[count:], strict=True)
    ]
    batched = BatchedProgram(program, mapped, AddedAxis.of(axis))
    results = _attached(batched, fronted[:count], computed)
    return results, [0] * len(results)


def _tangents_of(
    linear: Derivative,
    primals: Sequence[Any],
    residuals: Sequence[Any],
    tangents_in: Sequence[Any],
    results: Sequence[Any],
) -> list[Any]:
    cotangents = tuple(jax.typeof(results[index]) for index in linear.with_cotangent)
    types = (cotangents, tuple(map(jax.typeof, tangents_in)))
    outputs = _tangents.bind(*primals, *residuals, *tangents_in, linear=linear, types=types)
    tangents = dict(zip(linear.with_cotangent, outputs, strict=True))
    return [tangents[n] if n in tangents else _none(result) for n, result in enumerate(results)]


def _batch_call(
    axis: Any, arrays: Sequence[Any], axes: Sequence[Any], *, program: Program, jaxpr: Any
) -> Any:
    if _is_around(axis, axes, jaxpr):
        results = _bound(program, arrays)
        return results, [None] * len(results)
    fronted = [_fronted(*pair) for pair in zip(arrays, axes, strict=True)]
    batched = BatchedProgram(program, tuple(axis is not None for axis in axes), AddedAxis.of(axis))
    results = _bound(batched, fronted)
    return results, [0] * len(results)


def _is_around(axis: Any, axes: Sequence[Any], jaxpr: Any) -> bool:
    """Whether an axis is none of an operation's."""
    named = jaxpr is not None and any(getattr(e, "name", None) == axis.name for e in jaxpr.effects)
    return not named and all(axis is None for axis in axes)


def _split(operands: Sequence[Any], linear: Derivative, last: int) -> tuple[list[Any], ...]:
    operands = list(operands)
    end = len(operands) - last
    return operands[: linear.count], operands[linear.count : end], operands[end:]


def _expand(*operands: Any, linear: Derivative, types: Any) -> list[Any]:
    primals, residuals, tangents = _split(operands, linear, len(linear.which))
    return _transposed(
        lambda *cotangents: linear.backward(primals, residuals, cotangents), types, tangents
    )


def _transposed(pull: Any, types: Any, tangents: Sequence[Any]) -> list[Any]:
    """The map of tangents, from that of cotangents."""
    try:
        return list(jax.linear_transpose(pull, *types[0])(list(tangents)))
    except (NotImplementedError, ValueError, TypeError) as error:
        raise NotImplementedError(
            "forward-mode derivatives (jax.jvp, jax.jacfwd) of torch code are made from its "
            "backward, and the backward of this code is not linear in the gradient it is given (a "
            "hook or an autograd.Function that clips it?), or has an operation that JAX cannot "
            "transpose; take derivatives in reverse (jax.grad, jax.vjp, jax.jacrev)"
        ) from error


def _cotangent_types(*_: Any, linear: Derivative, types: Any) -> list[Any]:
    return list(types[0])


def _transpose_tangents(
    cotangents: Any, *operands: Any, linear: Derivative, types: Any
) -> list[Any]:
    primals, residuals, _ = _split(operands, linear, len(linear.which))
    full = list(map(_full, cotangents, types[0]))
    cotangents_in = _bound_vjp(linear, types, [*primals, *residuals, *full])
    return [*[None] * (len(primals) + len(residuals)), *cotangents_in]


def _bound_vjp(linear: Derivative, types: Any, operands: Sequence[Any]) -> list[Any]:
    def pull(*args: Any) -> list[Any]:
        return list(linear.backward(*_split(args, linear, len(types[0]))))

    jaxpr = jax.make_jaxpr(pull)(*operands)
    return _vjp.bind(*operands, linear=linear, types=types, jaxpr=jaxpr)


def _jvp_of_tangents(
    primals: Sequence[Any], tangents: Sequence[Any], *, linear: Derivative, types: Any
) -> tuple[list[Any], list[Any]]:
    operands, residuals, tangents_in = _split(primals, linear, len(linear.which))
    changes, _, changes_of_tangents = _split(tangents, linear, len(linear.which))
    results = _tangents.bind(*primals, linear=linear, types=types)
    changed: list[Any] = []
    if any(not isinstance(change, Zero) for change in changes_of_tangents):
        full = list(map(_full, changes_of_tangents, types[1]))
        changed = _tangents.bind(*operands, *residuals, *full, linear=linear, types=types)
    which = _changing(changes)
    if which:
        second = linear.vjp.linear(which)

        def pull(*cotangents: Any) -> list[Any]:
            point = [*operands, *cotangents]
            _, residuals = second.forward(*map(jax.lax.stop_gradient, operands), *cotangents)
            moved = [linear.vjp.spread(index, changes[index]) for index in which]
            return _expand(*point, *residuals, *moved, linear=second, types=(types[1], ()))

        more = _transposed(pull, types, tangents_in)
        changed = [a + b for a, b in zip(changed, more, strict=True)] if changed else more
    return results, changed or list(map(_none, results))


def _batched(
    axis: Any, arrays: Any, axes: Any, linear: Derivative, types: Any, last: int
) -> tuple[Derivative, Any, list[Any]]:
    """A `Derivative` for many examples, its types and operands."""
    added = AddedAxis.of(axis)
    fronted = [_fronted(*pair) for pair in zip(arrays, axes, strict=True)]
    mapped = [axis is not None for axis in axes]
    operands, residuals, values = _split(fronted, linear, last)
    on, mapped_residuals, moved = _split(mapped, linear, last)
    values = [
        value if is_mapped else jnp.broadcast_to(value, (added.size, *value.shape))
        for value, is_mapped in zip(values, moved, strict=True)
    ]
    batched = BatchedDerivative(linear, tuple(on), tuple(mapped_residuals), added)
    longer = tuple(tuple(_longer(aval, added.size) for aval in some) for some in types)
    return batched, longer, [*operands, *residuals, *values]


def _batch_tangents(axis: Any, arrays: Any, axes: Any, *, linear: Derivative, types: Any) -> Any:
    if _is_around(axis, axes, None):
        results = _tangents.bind(*arrays, linear=linear, types=types)
        return results, [None] * len(results)
    linear, types, tangents = _batched(axis, arrays, axes, linear, types, len(linear.which))
    results = _tangents.bind(*tangents, linear=linear, types=types)
    return results, [0] * len(results)


def _pull(*operands: Any, linear: Derivative, types: Any, jaxpr: Any) -> list[Any]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _pulled(*_: Any, linear: Derivative, types: Any, jaxpr: Any) -> list[Any]:
    return list(types[1])


def _transpose_vjp(
    changes: Any, *operands: Any, linear: Derivative, types: Any, jaxpr: Any
) -> list[Any]:
    primals, residuals, _ = _split(operands, linear, len(types[0]))
    full = list(map(_full, changes, types[1]))
    tangents = _tangents.bind(*primals, *residuals, *full, linear=linear, types=types)
    return [*[None] * (len(primals) + len(residuals)), *tangents]


def _jvp_of_vjp(
    primals: Sequence[Any], tangents: Sequence[Any], *, linear: Derivative, types: Any, jaxpr: Any
) -> tuple[list[Any], list[Any]]:
    operands, _, cotangents = _split(primals, linear, len(types[0]))
    changes, _, changes_of_cotangents = _split(tangents, linear, len(types[0]))
    results = _bound_vjp(linear, types, primals)
    moved = [*changes, *changes_of_cotangents]
    which = _changing(moved)
    if not which:
        return results, list(map(_none, results))
    program = linear.vjp
    second = program.linear(which)
    point = [*operands, *cotangents]
    _, residuals = second.forward(*map(jax.lax.stop_gradient, point))
    spread = [program.spread(index, moved[index]) for index in which]
    return results, _tangents_of(second, point, residuals, spread, results)


def _batch_vjp(
    axis: Any, arrays: Any, axes: Any, *, linear: Derivative, types: Any, jaxpr: Any
) -> Any:
    if _is_around(axis, axes, jaxpr):
        results = _bound_vjp(linear, types, arrays)
        return results, [None] * len(results)
    linear, types, cotangents = _batched(axis, arrays, axes, linear, types, len(types[0]))
    results = _bound_vjp(linear, types, cotangents)
    return results, [0] * len(results)


def _fronted(array: Any, axis: Any) -> Any:
    return array if axis is None else jnp.moveaxis(array, axis, 0)


def _longer(aval: Any, size: int) -> Any:
    spread = NamedSharding(aval.sharding.mesh, P(None, *aval.sharding.spec))
    return aval.update(shape=(size, *aval.shape), sharding=spread)


def _changing(tangents: Sequence[Any]) -> tuple[int, ...]:
    return tuple(
        index
        for index, tangent in enumerate(tangents)
        if not isinstance(tangent, Zero) and getattr(tangent, "dtype", None) != jax.dtypes.float0
    )


def _full(cotangent: Any, aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype) if isinstance(cotangent, Zero) else cotangent


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
    _cotangent_types,
    transpose=_transpose_tangents,
    jvp=_jvp_of_tangents,
    named_batch=_batch_tangents,
    several=True,
)
_vjp = new_primitive(
    "program_pullback",
    _pull,
    _pulled,
    transpose=_transpose_vjp,
    jvp=_jvp_of_vjp,
    named_batch=_batch_vjp,
    effects=_effects,
    several=True,
)
