"""Small `jit` calls are written out, and loops keep nothing that nobody reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from isoshard.core.repeats.inlined_calls import inlined
from isoshard.core.repeats.rolled_program import rolled
from tests.core.repeats.rolled_values import both


def names(program) -> list[str]:
    return [one.primitive.name for one in program.eqns]


def test_the_same_program_called_twice_has_results_of_its_own():
    def step(x, y):
        return jnp.where(x > 0, x, 0.0) + jnp.where(y > 0, y, 0.0)

    x, y = jnp.array([-1.0, 2.0]), jnp.array([3.0, -4.0])
    program = inlined(jax.make_jaxpr(step)(x, y))
    assert "jit" not in names(program)
    np.testing.assert_array_equal(jaxpr_as_fun(program)(x, y)[0], step(x, y))


def test_calls_with_layouts_or_programs_inside_stay():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    layout = jax.sharding.NamedSharding(mesh, jax.P("data"))
    laid = jax.jit(jnp.sin, in_shardings=layout)
    nested = jax.jit(lambda x: jax.checkpoint(jnp.cos)(x))
    program = jax.make_jaxpr(lambda x: laid(x) + nested(x))(jnp.ones(4))
    assert inlined(program) is program
    assert names(program) == ["jit", "jit", "add"]


def test_constants_are_not_kept_from_one_loop_for_the_next():
    """The zeros of `jnp.where` would be an array over all layers, and so would gradients."""

    def loss(layers, x):
        for weight in layers:
            scores = jnp.where(jnp.tril(jnp.ones((32, 32), bool)), x @ weight, 0.0)
            x = x + jax.nn.softmax(scores)
        return jnp.sum(x)

    layers = [jnp.full((32, 32), 0.01)] * 6
    program = jax.make_jaxpr(jax.grad(loss))(layers, jnp.ones((32, 32)))
    found = rolled(program)
    (length,) = {one.length for one in found.loops}
    read = {
        one for equation in found.program.eqns for one in equation.invars
        if not isinstance(one, Literal)
    } | set(found.program.jaxpr.outvars)  # fmt: skip
    loops = [one for one in found.program.eqns if one.primitive.name == "scan"]
    stacks = [one for loop in loops for one in loop.outvars if one.aval.shape[:1] == (length,)]
    assert all(one in read for one in stacks)
    kept = [one.aval.str_short() for one in loops[0].outvars if one.aval.shape == (length, 32, 32)]
    assert len(kept) <= 2, kept  # what goes in, and the exponentials


def test_one_array_is_kept_in_the_place_of_two_that_are_made_of_it():
    """Neither reads the exponential, which alone makes both."""

    @jax.custom_vjp
    def activation(x):
        return jnp.exp(x)

    def forward(x):
        grown = jnp.exp(x)
        return grown, (1 - grown * grown, 2.0 / (1 + grown))

    def backward(saved, slope):
        square, ratio = saved
        return (slope * square + jnp.sin(ratio),)

    activation.defvjp(forward, backward)

    def loss(layers, x):
        for weight in layers:
            x = x + activation(x @ weight)[:, :8]
        return jnp.sum(x)

    layers, x = [jnp.full((8, 16), 0.01 * n) for n in range(1, 7)], jnp.ones((4, 8))
    program = jax.make_jaxpr(jax.grad(loss))(layers, x)
    found = rolled(program)
    loops = [one for one in found.program.eqns if one.primitive.name == "scan"]
    kept = [one.aval.str_short() for one in loops[0].outvars if one.aval.shape[1:] == (4, 16)]
    assert len(kept) == 1, kept
    for one, other in zip(*both(program, found, [*layers, x], compiled=True), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_programs_of_64_bit_types_are_rolled_where_these_are_off():
    def layers(weights, x):
        for weight in weights:
            x = jnp.sin(x @ weight) + weight.sum()
        return x

    for kind in (np.complex128, np.float64, np.int64):
        with jax.enable_x64(True):
            weights, x = [np.ones((8, 8), kind)] * 6, np.ones((2, 8), kind)
            program = jax.make_jaxpr(layers)(weights, x)
        found = rolled(program)
        assert found is not None
        assert found.program.out_avals[-1].dtype == program.out_avals[-1].dtype, kind
