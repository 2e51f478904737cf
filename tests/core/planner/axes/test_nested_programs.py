"""Programs inside equations, and which values outside are which inside."""

import jax
import jax.numpy as jnp
from jax import lax

from isoshard.core.planner.axes.nested_programs import Link, bodies


def last(function, *args):
    return jax.make_jaxpr(function)(*args).eqns[-1]


def test_a_scan_has_rows_and_a_carry():
    x, w = jnp.ones((8, 4)), jnp.ones((3, 4, 4))
    scale = jnp.float32(2.0)
    body = bodies(last(lambda x, w: lax.scan(lambda h, w: (h @ w * scale, h), x, w), x, w))[0]
    assert body.times == 3
    assert body.operands[-1].leading
    assert body.results == (Link(0, 0), Link(1, 1, leading=True))
    ((result, carried),) = body.carried
    assert body.jaxpr.outvars[result].aval.shape == body.jaxpr.invars[carried].aval.shape


def test_a_while_has_a_condition_and_a_body():
    found = bodies(
        last(
            lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + x.mean(), x), jnp.ones(3)
        )
    )
    assert [one.kind for one in found] == ["condition", "while"]
    assert found[1].carried == ((0, 0),)


def test_branches():
    found = bodies(last(lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x), True, jnp.ones(3)))
    assert [one.kind for one in found] == ["branch", "branch"]
    assert found[0].operands == (Link(1, 0),)


def test_calls():
    assert bodies(last(jax.jit(jnp.sin), jnp.ones(3)))[0].operands == (Link(0, 0),)
    assert len(bodies(last(jax.checkpoint(jnp.sin), jnp.ones(3)))) == 1
    assert bodies(last(jnp.sin, jnp.ones(3))) == ()
