"""Optimizers whose moments are updated in the loop that makes the gradients."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun

from isoshard.core.repeats.rolled_program import rolled
from isoshard.core.runtime.jaxprs import scan_counts
from tests.core.repeats.rolled_values import both

DEPTH, WIDTH = 4, 128
STACK = f"{DEPTH},{WIDTH},{WIDTH}"

MOMENTS = {
    "adamw": (optax.adamw(1e-2), 2),
    "amsgrad": (optax.amsgrad(1e-2), 2),  # the maximum is made of them
    "momentum": (optax.sgd(1e-2, momentum=0.9), 1),
}
"""Optimizers that make new parameters of moments alone, and how many moments they keep."""
OTHERS = {
    "nesterov": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "rmsprop": optax.rmsprop(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
}
"""Those that read the gradient for the parameter, or all gradients first."""


@pytest.fixture(autouse=True)
def wide():
    """Values are compared in float64.

    XLA 0.12 rounds a product in a loop otherwise than the same product outside of it, and RMSprop
    and Adam divide by the square roots of small moments: in float32 the two forms differ by 4e-4
    of the largest number, each being 2e-4 to 3e-4 from the result in float64.
    """
    with jax.enable_x64(True):
        yield


def _traced(optimizer):
    def loss(layers, x):
        for layer in layers:
            x = jnp.tanh(x @ layer["weight"].T + layer["bias"])
        return jnp.sum(x)

    def step(layers, state, x):
        gradients, of_x = jax.grad(loss, (0, 1))(layers, x)  # of x: the first layer is like others
        updates, state = optimizer.update(gradients, state, layers)
        return optax.apply_updates(layers, updates), state, of_x

    draw = np.random.default_rng(0)
    layers = [
        {
            "weight": jnp.asarray(draw.standard_normal((WIDTH, WIDTH)) * 0.1),
            "bias": jnp.full((WIDTH,), 0.1 * layer),
        }
        for layer in range(DEPTH)
    ]
    x = jnp.asarray(draw.standard_normal((4, WIDTH)))
    arguments = layers, optimizer.init(layers), x
    kept = len(jax.tree.leaves(arguments[:2]))
    return jax.make_jaxpr(step)(*arguments), jax.tree.leaves(arguments), [*range(kept), None]


def _stacks(found):
    """How many arrays of weights of all layers the last loop carries, and how many it gives."""
    loop = [one for one in found.program.eqns if one.primitive.name == "scan"][-1]
    carries = scan_counts(loop.params)[1]
    shapes = [one.aval.shape for one in loop.outvars]
    whole = DEPTH, WIDTH, WIDTH
    return shapes[:carries].count(whole), shapes[carries:].count(whole)


def _assert_close(program, found, inputs):
    for one, other in zip(*both(program, found, inputs, compiled=True), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MOMENTS)
def test_moments_are_replaced_row_by_row_and_no_gradient_is_stacked(name):
    optimizer, moments = MOMENTS[name]
    program, inputs, replaces = _traced(optimizer)
    found = rolled(program, replaces=replaces, updates=True)
    assert _stacks(found) == (moments, 0)
    assert _stacks(rolled(program, replaces=replaces)) == (0, 1)
    if name == "adamw":
        _assert_close(program, found, inputs)


@pytest.mark.parametrize("name", OTHERS)
def test_what_would_need_more_arrays_stays_after_the_loop(name):
    program, inputs, replaces = _traced(OTHERS[name])
    found = rolled(program, replaces=replaces, updates=True)
    assert _stacks(found) == (0, 1)
    if name == "clipped":
        _assert_close(program, found, inputs)


def test_a_gradient_that_the_step_gives_is_stacked():
    program, _, replaces = _traced(optax.chain(optax.trace(0.9), optax.scale(-1e-2)))
    # the trace is what the loop would replace; here it is no new value of an input
    found = rolled(program, replaces=[None] * len(replaces), updates=True)
    assert _stacks(found)[0] == 0


def test_the_compiler_copies_no_stack():
    program, inputs, replaces = _traced(MOMENTS["adamw"][0])
    found = rolled(program, replaces=replaces, updates=True)
    given = [
        jax.ShapeDtypeStruct((len(one.indices), *inputs[one.indices[0]].shape), jnp.float64)
        if one.stacked
        else jax.ShapeDtypeStruct(inputs[one.indices[0]].shape, inputs[one.indices[0]].dtype)
        for one in found.inputs
    ]
    run = jax.jit(jaxpr_as_fun(found.program), donate_argnums=range(len(given) - 1))
    text = run.lower(*given).compile().as_text()
    assert re.search(rf"= f64\[{STACK}\]\S* dynamic-update-slice\(", text)
    assert not re.findall(rf"= f64\[{STACK}\]\S* copy\(", text)
    assert not re.findall(
        rf"= f64\[1,{WIDTH},{WIDTH}\]\S* fusion\(", text
    )  # a row before it is used
