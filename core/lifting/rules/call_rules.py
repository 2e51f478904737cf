"""Calls: inner functions are interpreted and keep their custom JVPs and VJPs."""

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
    """The callee, rematerialized in the backward pass by its policy."""

    def inside(values: list[Value]) -> list[Value]:
        return interpret_program(eqn.params["jaxpr"], values)

    results = results_of(inside, values)
    run = jax.checkpoint(
        on_arrays(inside, [value.frame for value in values], results),
        policy=eqn.params["policy"],
        prevent_cse=eqn.params["prevent_cse"],
    )
    return _as_values(run(*(value.array for value in values)), results)


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
        remaining = iter(tangents)
        filled = [
            next(remaining) if i in moving else _no_gradient(x) for i, x in enumerate(primals)
        ]
        outputs, tangents_out = jax.jvp(lambda *x: bind(eqn, x), tuple(primals), tuple(filled))
        return outputs, [tangents_out[i] for i in _inexact(outputs)]

    @run.defjvp
    def run_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        closed, _ = trace(derivative, (shapes, [shapes[i] for i in moving]))
        inputs = _as_values(primals, frames)
        inputs += [frames[i].of(tangents[i]) for i in moving]
        outputs = interpret_program(closed, inputs)
        primals_out = _arrays_of(outputs, results)
        inexact = _inexact(primals_out)
        tangents_out = _arrays_of(outputs[len(results) :], [results[i] for i in inexact])
        flowing = dict(zip(inexact, tangents_out, strict=True))
        return primals_out, [flowing.get(i, _no_gradient(x)) for i, x in enumerate(primals_out)]

    return _as_values(run(*(value.array for value in values)), results)


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
        outputs, pull = jax.vjp(lambda *x: bind(eqn, x), *primals)
        remaining = iter(cotangents)
        flowing = _inexact(outputs)
        filled = [
            next(remaining) if i in flowing else _no_gradient(x) for i, x in enumerate(outputs)
        ]
        pulled = pull(filled)
        return [pulled[i] for i in moving]

    def backward(primals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        flowing = _inexact(cotangents)
        inputs = _as_values(primals, frames)
        inputs += [results[i].of(cotangents[i]).with_zeros() for i in flowing]
        closed, _ = trace(gradient, (shapes, _shapes(inputs[len(primals) :])))
        grads = _arrays_of(interpret_program(closed, inputs), [frames[i] for i in moving])
        pulled = dict(zip(moving, grads, strict=True))
        return tuple(pulled.get(i) for i in range(len(primals)))

    run.defvjp(lambda *x: (forward(*x), x), backward)
    return _as_values(run(*(value.array for value in values)), results)


def _as_values(arrays: Sequence[Any], frames: Sequence[Frame]) -> list[Value]:
    return [frame.of(array) for array, frame in zip(arrays, frames, strict=True)]


def _arrays_of(values: Sequence[Value], frames: Sequence[Frame]) -> list[Any]:
    return [
        value.with_splits(frame.splits).array for value, frame in zip(values, frames, strict=False)
    ]


def _shapes(values: Sequence[Value]) -> list[Any]:
    return [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]


def _inexact(arrays: Sequence[Any]) -> list[int]:
    return [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _no_gradient(x: Any) -> np.ndarray:
    return np.zeros(x.shape, jax.dtypes.float0)
