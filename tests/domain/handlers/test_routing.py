"""A function with a handler: values, gradients, layouts, collectives, and when it is left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard import UnevenArray
from isoshard.core.layout.mesh import make_mesh

from ..blocks import in_blocks, out_of_blocks, padding_of

RNG = np.random.default_rng(0)
A, B = RNG.normal(size=(2, 24)).astype(np.float32)
CALLS = []


def dot_handler(shards, a, b):
    CALLS.append(shards.specs)
    return shards.all_reduce(jnp.dot(a, b), shards.axes(0, 0)), P()


dot = iso.domain.register_function_handler(jnp.dot, dot_handler)


def laid(x, mesh, spec):
    return iso.shard(x, mesh, spec)


def test_dot_and_its_gradients(mesh):
    spec = P(("y", "x"))
    a, b = laid(A, mesh, spec), laid(B, mesh, spec)
    loss = lambda a, b: jnp.sin(dot(a, b))  # noqa: E731
    with jax.set_mesh(mesh):
        value, gradients = jax.value_and_grad(loss, (0, 1))(a, b)
    exact = np.dot(A.astype(np.float64), B.astype(np.float64))
    np.testing.assert_allclose(value, np.sin(exact), rtol=1e-5)
    for gradient, other in zip(gradients, (B, A), strict=True):
        np.testing.assert_allclose(gradient, np.cos(exact) * other, rtol=1e-4, atol=1e-6)
        assert gradient.sharding.is_equivalent_to(a.sharding, 1)


def test_inside_jit_it_sends_one_number(mesh):
    own, other = laid(A, mesh, P("x")), laid(B, mesh, P("x"))
    step = jax.jit(lambda a, b: dot.over(mesh, P("x"), P("x"))(a * 2, b))
    np.testing.assert_allclose(step(own, other), 2 * np.dot(A, B), rtol=1e-5)
    text = step.lower(own, other).compile().as_text()
    assert text.count(" all-reduce(") == 1
    for word in ("all-gather", "collective-permute", "all-to-all"):
        assert f" {word}(" not in text


def test_arguments_that_are_whole():
    mesh = make_mesh((4,), ("x",))

    def handler(shards, rows, weight, *, scale):
        assert shards.axes("scale", 0) == shards.axes(weight, 0) == ()
        assert shards.spec(rows) == P("x") and shards.shape(0) == (8, 3)
        return rows @ weight * scale, shards.like(rows, 0, None)

    def scaled(rows, weight, *, scale):
        return rows @ weight * scale

    routed = iso.domain.register_function_handler(scaled, handler)
    rows, weight, scale = A.reshape(8, 3), B[:6].reshape(3, 2), np.float32([2, 3])
    loss = lambda *args: (routed(*args, scale=scale) ** 2).sum()  # noqa: E731
    given = laid(rows, mesh, P("x")), laid(weight, mesh, P())
    np.testing.assert_allclose(routed(*given, scale=scale), rows @ weight * scale, rtol=1e-5)
    out = 2 * rows @ weight * scale**2
    with jax.set_mesh(mesh):
        got = jax.grad(loss, (0, 1))(*given)
    np.testing.assert_allclose(got[0], out @ weight.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[1], rows.T @ out, rtol=1e-4, atol=1e-5)  # summed over devices


def test_uneven_blocks_come_with_zeros_for_padding():
    sizes = (0, 3, 9, 6)
    mesh = make_mesh((4,), ("x",))
    a, b = (in_blocks(x[:18], mesh, P("x"), (sizes,)) for x in (A, B))
    np.testing.assert_allclose(dot(a, b), np.dot(A[:18], B[:18]), rtol=1e-5)
    gradient = jax.jit(jax.grad(dot))(a, b)
    assert isinstance(gradient, UnevenArray) and gradient.sizes == (sizes,)
    assert gradient.sharding == a.sharding
    np.testing.assert_allclose(out_of_blocks(gradient), B[:18], rtol=1e-6)
    assert not padding_of(gradient).any()


def test_where_nothing_is_split_the_function_itself_runs(mesh):
    CALLS.clear()
    for a in (A, jnp.asarray(A), laid(A, mesh, P()), jax.device_put(A, jax.devices()[3])):
        np.testing.assert_allclose(dot(a, a), np.dot(A, A), rtol=1e-5)
    whole = jax.jit(lambda a: dot.over(mesh, None, None)(a, a))
    np.testing.assert_allclose(whole(A), np.dot(A, A), rtol=1e-5)
    assert not CALLS
    CALLS.clear()
    for _ in range(2):  # a handler is traced twice and no more
        dot(laid(A[:8], mesh, P("x")), laid(A[:8], mesh, P("x")))
    assert len(CALLS) == 2
    many = jax.vmap(dot.over(mesh, P("x"), P("x")))
    a = jnp.asarray(A.reshape(2, 12))
    np.testing.assert_allclose(many(a, a), (A.reshape(2, 12) ** 2).sum(1), rtol=1e-5)


def test_inside_a_handler_and_shard_map_the_function_itself_runs():
    mesh = make_mesh((4,), ("x",))
    inner = jax.shard_map(lambda a: dot(a, a)[None], mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_allclose(
        inner(laid(A[:8], mesh, P("x"))), (A[:8] ** 2).reshape(4, 2).sum(1), rtol=1e-5
    )

    def handler(shards, a):
        return shards.all_reduce(dot(a, a), "x"), P()

    outer = iso.domain.register_function_handler(lambda a: dot(a, a), handler)
    np.testing.assert_allclose(outer(laid(A, mesh, P("x"))), np.dot(A, A), rtol=1e-5)


def test_what_is_known_to_be_the_same_need_not_be_proved():
    mesh = make_mesh((4,), ("x",))

    def handler(shards, x):
        whole = shards.all_gather(x, shards.axes(x, 0))
        return jnp.sort(whole), P()

    routed = iso.domain.register_function_handler(jnp.sort, handler, prove=False)
    a = laid(A, mesh, P("x"))
    np.testing.assert_array_equal(routed(a), np.sort(A))
    with jax.set_mesh(mesh):
        gradient = jax.grad(lambda a: (routed(a) * np.arange(24)).sum())(a)
    np.testing.assert_array_equal(gradient, np.argsort(np.argsort(A)))


@pytest.mark.parametrize("sizes", [(5, 2, 7, 4), None])
def test_inside_lift_told_how_it_lies(sizes):
    mesh = make_mesh((4,), ("x",))
    fresh = iso.domain.register_function_handler(jnp.dot, dot_handler)
    told = fresh.over(mesh, P("x"), P("x"))
    a = A[:16] if sizes is None else A[:18]
    own = laid(a, mesh, P("x")) if sizes is None else in_blocks(a, mesh, P("x"), (sizes,))
    CALLS.clear()
    run = iso.domain.lift(lambda a: told(a * 2, jnp.sin(a)))
    with jax.set_mesh(mesh):
        value, gradient = jax.value_and_grad(run)(own)
    assert CALLS
    np.testing.assert_allclose(value, 2 * np.dot(a, np.sin(a)), rtol=1e-5)
    exact = 2 * np.sin(a) + 2 * a * np.cos(a)
    np.testing.assert_allclose(out_of_blocks(gradient), exact, rtol=1e-5, atol=1e-6)
