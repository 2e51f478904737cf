"""Whole training steps of deep models: forward, backward, clipping and AdamW."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

from isoshard.core.repeats.rolled_program import Stack, rolled
from tests.core.repeats.rolled_values import assert_equal, both

WIDTH, HEADS, WORDS = 16, 2, 32


def _norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _layer(layer, x, key):
    batch, length, width = x.shape
    heads = (_norm(x, layer["norm"]) @ layer["qkv"]).reshape(batch, length, HEADS, -1)
    query, keys, values = jnp.split(heads, 3, -1)
    scores = jnp.einsum("bthd,bshd->bhts", query, keys) / np.sqrt(width / HEADS)
    mask = jnp.tril(jnp.ones((length, length), bool))
    scores = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
    mixed = jnp.einsum("bhts,bshd->bthd", scores, values).reshape(x.shape)
    x = x + mixed @ layer["out"]
    hidden = jax.nn.gelu(x @ layer["up"])
    kept = jax.random.bernoulli(key, 0.9, hidden.shape)
    return x + jnp.where(kept, hidden / 0.9, 0) @ layer["up"].T


def _loss(params, words, key):
    x = params["words"][words]
    for layer, one in zip(
        params["layers"], jax.random.split(key, len(params["layers"])), strict=True
    ):
        x = _layer(layer, x, one)
    scores = x @ params["words"].T
    labels = jnp.roll(words, -1, 1)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def _params(depth):
    draw = np.random.default_rng(0)

    def one(*shape):
        return jnp.asarray(draw.standard_normal(shape) * 0.1, jnp.float32)

    layers = [
        {
            "norm": 1 + one(WIDTH),
            "qkv": one(WIDTH, 3 * WIDTH),
            "out": one(WIDTH, WIDTH),
            "up": one(WIDTH, 2 * WIDTH),
        }
        for _ in range(depth)
    ]
    return {"words": one(WORDS, WIDTH), "layers": layers}


def _traced(depth):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def step(params, state, words, key):
        loss, grads = jax.value_and_grad(_loss)(params, words, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = _params(depth)
    words = jnp.asarray(np.random.default_rng(1).integers(0, WORDS, (2, 4)))
    arguments = params, optimizer.init(params), words, jax.random.key(0)
    kept = len(jax.tree.leaves(arguments[:2]))
    return jax.make_jaxpr(step)(*arguments), jax.tree.leaves(arguments), [*range(kept), None]


@pytest.fixture(scope="module")
def transformer():
    program, inputs, replaces = _traced(3)
    return program, inputs, rolled(program, replaces=replaces)


def test_forward_and_backward_are_one_loop_each(transformer):
    program, _, found = transformer
    assert [one.length for one in found.loops] == [3, 3]
    assert found.batched > 30
    assert found.reasons == ()
    assert len(found.program.eqns) < len(program.eqns) / 2


def test_parameters_moments_and_their_new_values_are_the_same_stacks(transformer):
    program, _, found = transformer
    stacks = [one for one in found.inputs if one.stacked]
    assert {len(one.indices) for one in stacks} == {3}
    assert len(stacks) == 3 * 4
    assert [one for one in found.results if one.stacked] == stacks
    assert found.results[-1] == Stack((len(program.jaxpr.outvars) - 1,), False)


def test_the_step_gives_the_same_numbers(transformer):
    program, inputs, found = transformer
    wanted, got = both(program, found, inputs, compiled=True)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_the_size_of_the_program_does_not_grow_with_depth(transformer):
    deeper, _, replaces = _traced(5)
    found = rolled(deeper, replaces=replaces)
    assert [one.length for one in found.loops] == [5, 5]
    assert len(found.program.eqns) <= len(transformer[2].program.eqns) + 60


def test_layers_that_are_computed_again_are_one_loop_each_way():
    """Of two borders the one that parts no layer: its parameters pass a barrier together."""

    def layer(x, a, b):
        x = x + jnp.tanh(x @ a)
        return x + jnp.sin(x @ b)

    def step(x, table, layers):
        kept = [x]
        a, b = layers[0]
        hidden = x @ a
        table = jnp.exp(table)  # the first layer makes what all use, so it begins otherwise
        x = x + jnp.tanh(hidden)
        x = x + jnp.sin(x @ b)
        for a, b in layers[1:]:
            kept.append(x)
            x = layer(x, a, b)
        gradient, new = x * table, []
        for x, (a, b) in zip(reversed(kept), reversed(layers), strict=True):
            gradient, x, a, b = jax.lax.optimization_barrier((gradient, x, a, b))
            gradient, *own = jax.vjp(layer, x, a, b)[1](gradient)
            new.append(own)
        return gradient, new

    draw = np.random.default_rng(0)
    x, table, *rest = (jnp.asarray(draw.standard_normal((4, 4)) * 0.3) for _ in range(14))
    layers = list(zip(rest[::2], rest[1::2], strict=True))
    program = jax.make_jaxpr(step)(x, table, layers)
    found = rolled(program)
    assert [one.length for one in found.loops] == [5, 5]
    wanted, got = both(program, found, [x, table, *rest], compiled=True)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_equations_with_effects_are_never_in_a_loop():
    def step(x):
        for _ in range(5):
            x = jnp.tanh(x * 2.0 + 1.0) - x
            jax.debug.callback(lambda _: None, x)
        return x

    found = rolled(jax.make_jaxpr(step)(jnp.ones(3)))
    assert found.loops == ()
    effects = [one for one in found.program.eqns if one.effects]
    assert len(effects) == 5


def test_own_derivatives_and_programs_inside_stay_as_they_are():
    @jax.custom_vjp
    def clipped(x):
        return jnp.clip(x, -1, 1)

    clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (g * (abs(x) < 1),))
    inner = jax.jit(lambda x, w: jax.checkpoint(lambda x: jnp.sin(x @ w))(x))

    def step(x, weights):
        for weight in weights:
            x = clipped(jax.nn.relu(inner(x, weight)) + 0.1 * x)
        return x

    x, weights = jnp.ones((2, 4)), [jnp.eye(4) * number for number in range(5)]
    program = jax.make_jaxpr(step)(x, weights)
    found = rolled(program)
    assert [one.length for one in found.loops] == [5]
    names = {one.primitive.name for one in found.program.eqns[-1].params["jaxpr"].eqns}
    assert {"custom_vjp_call", "custom_jvp_call", "jit"} <= names
    assert_equal(program, found, [x, *weights], compiled=True)


def test_wide_types_stay_what_they_are():
    with jax.enable_x64(True):
        x = jnp.ones((2, 2), np.float64)

        def step(x, weights):
            for number, weight in enumerate(weights):
                x = jnp.sin(x @ weight) * np.float64(number + 0.1) + jnp.arange(2)
            return x

        weights = [x * n for n in range(4)]
        program = jax.make_jaxpr(step)(x, weights)
    found = rolled(program)
    assert [one.length for one in found.loops] == [4]
    assert found.program.out_avals[0].dtype == np.float64


def test_what_is_asked_for_wrongly():
    program = jax.make_jaxpr(lambda x: x + 1)(1.0)
    with pytest.raises(ValueError, match=r"at_least=1: a loop has 2 iterations or more"):
        rolled(program, at_least=1)
    with pytest.raises(ValueError, match=r"labels has 0 entries, and the program 1 inputs: give"):
        rolled(program, labels=[])
    with pytest.raises(ValueError, match=r"replaces has 2 entries, and the program 1 results"):
        rolled(program, replaces=[0, None])


def test_why_equal_parts_are_no_loop():
    makers = [jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jnp.sinh]
    weights = [jnp.ones((40, 40))] * 5

    def step(x, weights):
        made = [make(weight) for make, weight in zip(makers, weights, strict=True)]
        for weight in made:
            x = jnp.tanh(x @ weight) * 2.0 + x
        return x

    found = rolled(jax.make_jaxpr(step)(jnp.ones((2, 40)), weights))
    assert found.loops == ()
    [reason] = found.reasons
    assert reason == (
        "5 equal parts of 4 equations are no loop: an operand of `dot_general`, float32[40,40], is "
        "another value in each, and they are neither inputs of one kind nor outputs of one loop"
    )


def test_names_that_differ_in_a_number_are_one():
    """A bridge marks the output of each module by its name, `module:layers.0`."""

    def step(x, *weights):
        for number, weight in enumerate(weights):
            x = checkpoint_name(jnp.tanh(x @ weight), f"module:layers.{number}")
        return x

    program = jax.make_jaxpr(step)(*[jnp.ones((4, 4))] * 6)
    (loop,) = rolled(program).loops
    assert loop.length == 5
    assert not rolled(program, differentiated=True).loops  # a policy may still ask for a name
