"""Lifting: calls inside, loops, what comes back, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import isoshard as iso
from isoshard import P, ShardingError, UnevenArray

from .blocks import dense, in_blocks, out_of_blocks, padding_of, with_loss

SIZES = ((5, 2, 7, 4), None)
X = np.random.default_rng(0).normal(size=(18, 3)).astype(np.float32)


@pytest.fixture
def line():
    return iso.make_mesh((4,), ("x",))


@pytest.fixture
def u(line):
    return in_blocks(X, line, P("x"), SIZES)


@jax.custom_jvp
def doubled(x):
    return 2 * x


@doubled.defjvp
def doubled_jvp(primals, tangents):
    return doubled(primals[0]), 3 * tangents[0] + 0 * primals[0].sum()  # not what it is


@jax.custom_vjp
def clipped(x, count):
    return x * count, x.sum(0)


clipped.defvjp(
    lambda x, count: (clipped(x, count), x),
    lambda x, g: (jnp.clip(g[0], -0.1, 0.1) + g[1] * jnp.sort(x, 0), None),
)


INSIDE = {
    "jit": lambda x: jax.jit(lambda x: x / x.sum(0))(x),
    "remat": lambda x: jax.checkpoint(lambda x: jnp.sin(x) * x.mean(0))(x),
    "custom jvp": doubled,
    "custom vjp": lambda x: clipped(x, 3),
    "scan over rows": lambda x: jax.lax.scan(lambda c, r: (c + jnp.sin(r), c), x[0], x),
    "scan over layers": lambda x: jax.lax.scan(
        lambda c, w: (jnp.tanh(c * w), c.mean(0)), x, jnp.arange(1.0, 4.0, dtype=x.dtype)
    ),
    "scan from zeros": lambda x: jax.lax.scan(
        lambda c, w: (c + x * w, None), jnp.zeros_like(x), jnp.ones(3, x.dtype)
    ),
    "scan that turns": lambda x: jax.lax.scan(
        lambda c, w: (c[::-1] * w, None), x, jnp.ones(3, x.dtype)
    ),
    "cond": lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, lambda x: x[::-1] * 2, x),
    "cond of shapes": lambda x: jax.lax.cond(x.sum() > 0, lambda x: x.sum(0), lambda x: x[0], x),
    "vmap": lambda x: jax.vmap(lambda row: row / (1 + (row**2).sum()))(x),
    "grad": lambda x: jax.grad(lambda x: (jnp.sin(x) * x.mean(0)).sum())(x),
}


def test_calls_and_loops_inside(u):
    def run(x):
        return {name: inside(x) for name, inside in INSIDE.items()}

    lifted = iso.domain.lift(with_loss(run))
    (_, results), gradient = jax.jit(jax.value_and_grad(lifted, has_aux=True))(u)
    want, (want_gradient,) = dense(run, X)
    for name in INSIDE:
        leaves = jax.tree.leaves(results[name], is_leaf=lambda x: isinstance(x, UnevenArray))
        for found, right in zip(leaves, jax.tree.leaves(want[name]), strict=True):
            np.testing.assert_allclose(
                out_of_blocks(found), right, rtol=1e-4, atol=1e-4, err_msg=name
            )
    np.testing.assert_allclose(out_of_blocks(gradient), want_gradient, rtol=1e-3, atol=1e-3)
    kept = {name for name, found in results.items() if isinstance(found, UnevenArray)}
    assert {"jit", "remat", "custom jvp", "cond", "vmap", "grad"} <= kept
    assert results["scan over layers"][0].sizes == results["scan from zeros"][0].sizes == SIZES
    assert results["scan over rows"][1].sizes == SIZES


def test_while_loops(u):
    def run(x):
        return jax.lax.while_loop(
            lambda state: state[1] < 3, lambda state: (state[0] * 2 - 1, state[1] + 1), (x, 0)
        )

    found, turns = iso.domain.lift(run)(u)
    assert found.sizes == SIZES and turns == 3
    np.testing.assert_allclose(out_of_blocks(found), run(X)[0], rtol=1e-6)


def test_results_are_laid_out_and_padded_with_zeros(u, line):
    found = iso.domain.lift(lambda x: {"a": jnp.log(x * 0), "b": [x.T, x.sum()]})(u)
    assert found["a"].sharding.spec == P("x") and found["b"][0].sharding.spec == P(None, "x")
    assert found["b"][0].sizes == (None, SIZES[0]) and isinstance(found["b"][1], jax.Array)
    assert not padding_of(found["a"]).any() and np.isneginf(out_of_blocks(found["a"])).all()
    assert found["a"].layout == u.layout


def test_padding_is_never_read(line):
    u = in_blocks(X, line, P("x"), SIZES, np.inf)  # elsewhere NaN
    w = np.ones((3, 2), np.float32)

    def loss(u, w):
        return iso.domain.lift(lambda x, w: (jax.nn.softmax(x @ w, 0) * x[:, :2]).sum())(u, w)

    with jax.set_mesh(line):
        value, (gu, gw) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(u, w)
    plain = [torch.tensor(a, requires_grad=True) for a in (X, w)]
    right = ((plain[0] @ plain[1]).softmax(0) * plain[0][:, :2]).sum()
    ru, rw = torch.autograd.grad(right, plain)
    np.testing.assert_allclose(value, right.item(), rtol=1e-5)
    np.testing.assert_allclose(out_of_blocks(gu), ru, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gw, rw, rtol=1e-4, atol=1e-6)


def test_elementwise_moves_nothing(u):
    text = jax.jit(iso.domain.lift(lambda x: jnp.tanh(x) * 2 + 1)).lower(u).compile().as_text()
    for collective in ("all-gather", "all-reduce", "collective-permute", "all-to-all"):
        assert collective not in text
    text = jax.jit(iso.domain.lift(lambda x: jax.nn.softmax(x, 0))).lower(u).compile().as_text()
    assert "all-reduce" in text and "all-gather" not in text and "all-to-all" not in text


def test_stacks_and_their_rows_move_nothing(u):
    axis = 1

    def both(x):
        rows = jnp.unstack(x, axis=1)
        return jnp.stack([x, x + 1], axis), jnp.stack(rows[::-1], 1)

    lifted = jax.jit(iso.domain.lift(both))
    compiled = lifted.lower(u).compile().as_text()
    for collective in ("all-gather", "all-reduce", "collective-permute", "all-to-all"):
        assert collective not in compiled
    stacked, turned = lifted(u)
    np.testing.assert_array_equal(out_of_blocks(stacked), np.stack([X, X + 1], axis))
    np.testing.assert_array_equal(out_of_blocks(turned), X[:, ::-1])


def test_integers_and_booleans(line):
    n = in_blocks(np.arange(18, dtype=np.int32) % 5, line, P("x"), SIZES[:1], padding=99)
    found = iso.domain.lift(
        lambda n: (n.max(), n.min(), n.prod(), (n >= 0).all(), jnp.bincount(n, length=5), n // 2)
    )(n)
    assert [int(x) for x in found[:4]] == [4, 0, 0, 1]
    assert found[4].tolist() == [4, 4, 4, 3, 3]
    assert out_of_blocks(found[5]).tolist() == [i % 5 // 2 for i in range(18)]


def test_different_meshes_are_refused(u):
    other = in_blocks(X, iso.make_mesh((2, 2), ("a", "b")), P("a"), ((10, 8), None))
    with pytest.raises(ShardingError, match=r"2 different meshes: 'x' \(4\); 'a' \(2\), 'b' \(2\)"):
        iso.domain.lift(jnp.add)(u, other)


def test_batches_of_vmap_are_refused(u):
    with pytest.raises(ShardingError, match=r"batched by jax\.vmap"):
        jax.vmap(iso.domain.lift(jnp.sin))(u)


def test_arguments_that_are_no_arrays(u, line):
    v = in_blocks(2 * X, line, P("x"), ((0, 3, 9, 6), None))
    added = iso.domain.lift(jnp.add)(u, v)  # repacked to the first
    assert added.sizes == SIZES
    np.testing.assert_allclose(out_of_blocks(added), 3 * X, rtol=1e-6)
    scaled = iso.domain.lift(lambda x, by, how: x * by if how == "times" else x + by)
    np.testing.assert_allclose(out_of_blocks(scaled(u, 2.5, "times")), X * 2.5, rtol=1e-6)
    assert scaled(u, 2.5, how="plus").dtype == jnp.float32
    with pytest.raises(TypeError, match="a set, which is neither an array nor hashable"):
        iso.domain.lift(lambda x, names: x)(u, {"a"})
