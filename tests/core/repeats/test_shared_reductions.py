"""Backward loops that compute again what the forward has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.repeats.rolled_program import rolled
from isoshard.core.runtime.jaxprs import scan_counts
from tests.core.repeats.rolled_values import both

DEPTH, LENGTH, WIDTH = 5, 32, 8


def _attention(query, keys, values):
    scores = jax.nn.softmax(query @ keys.T, -1)
    return scores @ values


@jax.custom_vjp
def _again(query, keys, values):
    return _attention(query, keys, values)


def _forward(*operands):
    return _attention(*operands), operands


def _backward(operands, gradient):
    return jax.vjp(_attention, *operands)[1](gradient)


_again.defvjp(_forward, _backward)


def _traced(attention):
    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(attention(x @ weight, x, x)) + 0.5 * x
        return jnp.sum(x)

    draw = np.random.default_rng(0)
    weights = [
        jnp.asarray(draw.standard_normal((WIDTH, WIDTH)) * 0.1, jnp.float32) for _ in range(DEPTH)
    ]
    x = jnp.asarray(draw.standard_normal((LENGTH, WIDTH)), jnp.float32)
    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(weights, x)
    return program, [*weights, x]


def _assert_close(program, found, inputs):
    for one, other in zip(*both(program, found, inputs, compiled=True), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


def _names(found):
    loops = [one for one in found.program.eqns if one.primitive.name == "scan"]
    return [[each.primitive.name for each in one.params["jaxpr"].eqns] for one in loops]


def test_maxima_and_sums_are_read_and_scores_are_computed_again():
    program, inputs = _traced(_again)
    found = rolled(program)
    forward, backward = _names(found)
    assert forward.count("reduce_max") == 1 and forward.count("exp") == 1
    assert backward.count("reduce_max") == 0 and backward.count("exp") == 1
    assert all(one.aval.shape[1:] != (LENGTH, LENGTH) for one in _given(found))
    _assert_close(program, found, inputs)


def test_what_is_kept_apart_on_purpose_stays_apart():
    program, inputs = _traced(jax.checkpoint(_attention))
    found = rolled(program)
    _, backward = _names(found)
    assert "reduce_max" in backward or "checkpoint" in backward or "remat2" in backward
    _assert_close(program, found, inputs)


def _given(found):
    """What the forward gives the backward."""
    loop = next(one for one in found.program.eqns if one.primitive.name == "scan")
    return loop.outvars[scan_counts(loop.params)[1] :]
