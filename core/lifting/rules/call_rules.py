"""Calls: inner functions are interpreted; their custom JVPs and VJPs stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.blocks.block_values import Frame, Value
from isoshard.core.blocks.interpreting import bind, interpret_program, rule, trace
from isoshard.core.lifting.value_calls import on_arrays, results_of
from isoshard.core.runtime._jax_internals.jaxpr_classes import JaxprEqn
from isoshard.core.runtime.jaxprs import PLAIN_CALLS

_REMAT = ("remat2", "remat", "checkpoint")


@rule(*(name for name in PLAIN_CALLS if name not in _REMAT))
def call(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """The callee, inlined."""
    return interpret_program(eqn.params[PLAIN_CALLS[eqn.primitive.name]], values)


@rule(*_REMAT)
def rematerialized(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """The callee, rematerialized in the backward pass as was asked for."""

    def inside(values: list[Value]) -> list[Value]:
        return interpret_program(eqn.params["jaxpr"], values)

    results = results_of(inside, values)
    run = jax.checkpoint(
        on_arrays(inside, [value.frame for value in values], results),
        policy=eqn.params["policy"],
        prevent_cse=eqn.params["prevent_cse"],
    )
    return _made(run(*(value.array for value in values)), results)


@rule("custom_jvp_call")
def with_jvp(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """The callee, with its custom JVP traced at the true shapes."""

    def inside(values: list[Value]) -> list[Value]:
        return interpret_program(eqn.params["call_jaxpr"], values)

    frames = [value.frame for value in values]
    results = results_of(inside, values)
    shapes = _shapes(values)
    moving = _inexact(shapes)
    run = jax.custom_jvp(on_arrays(inside, frames, results))

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        given = iter(tangents)
        every = [next(given) if i in moving else _no_gradient(x) for i, x in enumerate(primals)]
        made, changes = jax.jvp(lambda *x: bind(eqn, x), tuple(primals), tuple(every))
        return made, [changes[i] for i in _inexact(made)]

    @run.defjvp
    def run_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        closed, _ = trace(derivative, (shapes, [shapes[i] for i in moving]))
        given = _made(primals, frames)
        given += [frames[i].of(tangents[i]) for i in moving]
        found = interpret_program(closed, given)
        made = _laid(found, results)
        changed = _inexact(made)
        changes = _laid(found[len(results) :], [results[i] for i in changed])
        flowing = dict(zip(changed, changes, strict=True))
        return made, [flowing.get(i, _no_gradient(x)) for i, x in enumerate(made)]

    return _made(run(*(value.array for value in values)), results)


@rule("custom_vjp_call", "custom_vjp_call_jaxpr")
def with_vjp(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """The callee, with its custom VJP; its forward is traced again with that."""

    def inside(values: list[Value]) -> list[Value]:
        closed = eqn.params.get("call_jaxpr") or eqn.params["fun_jaxpr"]
        return interpret_program(closed, values)

    frames = [value.frame for value in values]
    results = results_of(inside, values)
    shapes = _shapes(values)
    moving = _inexact(shapes)
    forward = on_arrays(inside, frames, results)
    run = jax.custom_vjp(forward)

    def gradient(primals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        made, pull = jax.vjp(lambda *x: bind(eqn, x), *primals)
        given = iter(cotangents)
        flowing = _inexact(made)
        every = [next(given) if i in flowing else _no_gradient(x) for i, x in enumerate(made)]
        pulled = pull(every)
        return [pulled[i] for i in moving]

    def backward(primals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        flowing = _inexact(cotangents)
        given = _made(primals, frames)
        given += [results[i].of(cotangents[i]).with_zeros() for i in flowing]
        closed, _ = trace(gradient, (shapes, _shapes(given[len(primals) :])))
        found = _laid(interpret_program(closed, given), [frames[i] for i in moving])
        pulled = dict(zip(moving, found, strict=True))
        return tuple(pulled.get(i) for i in range(len(primals)))

    run.defvjp(lambda *x: (forward(*x), x), backward)
    return _made(run(*(value.array for value in values)), results)


def _made(arrays: Sequence[Any], frames: Sequence[Frame]) -> list[Value]:
    return [frame.of(array) for array, frame in zip(arrays, frames, strict=True)]


def _laid(values: Sequence[Value], frames: Sequence[Frame]) -> list[Any]:
    return [value.with_splits(own.splits).array for value, own in zip(values, frames, strict=False)]


def _shapes(values: Sequence[Value]) -> list[Any]:
    return [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]


def _inexact(arrays: Sequence[Any]) -> list[int]:
    return [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _no_gradient(x: Any) -> np.ndarray:
    return np.zeros(x.shape, jax.dtypes.float0)
