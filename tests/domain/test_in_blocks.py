"""Functions with a body for arrays in blocks: called, refused, differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isoshard as iso
from isoshard import P, ShardingError

from .blocks import dense, in_blocks, out_of_blocks, with_loss
from .traffic import compiled, gathered

SIZES = ((5, 2, 7, 4), None)
X = np.random.default_rng(0).normal(size=(18, 3)).astype(np.float32)


@pytest.fixture
def line():
    return iso.make_mesh((4,), ("x",))


@pytest.fixture
def u(line):
    return in_blocks(X, line, P("x"), SIZES)


def running():
    """A running sum that tells when its rule is asked."""
    asked = []

    def rule(u):
        asked.append((u.sizes, u.layout.spec))
        return iso.domain.cumsum(u, 0)

    return iso.domain.in_blocks(lambda x: jnp.cumsum(x, 0), rule), asked


def test_inside_it_is_the_rule(u):
    function, asked = running()
    found = iso.domain.lift(lambda x: function(jnp.sin(x)) * 2)(u)
    assert found.sizes == SIZES
    assert asked == [(SIZES, P("x", P.UNCONSTRAINED))]
    np.testing.assert_allclose(out_of_blocks(found), 2 * np.cumsum(np.sin(X), 0), rtol=1e-5)


@pytest.mark.parametrize("inside", [False, True])
def test_gradients_go_through_the_rule(u, inside):
    function, asked = running()

    def loss(x):
        return with_loss(lambda x: jnp.sin(function(x)) * x)(x)[0]

    run = iso.domain.lift(jax.grad(loss)) if inside else jax.grad(iso.domain.lift(loss))
    with jax.set_mesh(u.array.sharding.mesh):
        found = run(u)
    _, (want,) = dense(lambda x: jnp.sin(jnp.cumsum(x, 0)) * x, X)
    assert found.sizes == SIZES and asked
    assert gathered(compiled(run, u)) == 4 * 3  # the sum of each block, and no rows
    np.testing.assert_allclose(out_of_blocks(found), want, rtol=1e-4, atol=1e-4)


def test_trees_of_several_and_of_none(u):
    def both(pair, bias):
        x, y = pair
        return {"sum": x + y, "bias": bias, "none": None}

    function = iso.domain.in_blocks(both, lambda *operands: iso.domain.lift(both)(*operands))
    found = iso.domain.lift(lambda x: function((x, 2 * x), x[0]))(u)
    assert found["none"] is None and found["sum"].sizes == SIZES
    np.testing.assert_allclose(out_of_blocks(found["sum"]), 3 * X, rtol=1e-6)
    np.testing.assert_array_equal(found["bias"], X[0])


def test_a_rule_may_decline(u):
    function = iso.domain.in_blocks(lambda x: jnp.cumsum(x, 0), lambda u: NotImplemented)

    def run(x):
        return function(x) + jax.grad(lambda x: (function(x) ** 2).sum())(x)

    found = iso.domain.lift(run)(u)
    want = iso.domain.lift(lambda x: run_plain(x))(u)
    np.testing.assert_allclose(out_of_blocks(found), out_of_blocks(want), rtol=1e-5)


def run_plain(x):
    return jnp.cumsum(x, 0) + jax.grad(lambda x: (jnp.cumsum(x, 0) ** 2).sum())(x)


def test_a_rule_of_other_shapes_is_told(u):
    function = iso.domain.in_blocks(lambda x: x, lambda u: iso.domain.pad(u, {0: (0, 1)}))
    with pytest.raises(ShardingError, match=r"shapes \[\(19, 3\)\], and the function gives"):
        iso.domain.lift(function)(u)
