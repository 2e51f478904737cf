"""Rules of primitives: which axes are the same dimension, and which cannot stay split."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

from isoshard.planner.propagation.dimension_rules import dimension_rule, has_rule, primitives


def rule(function, *shapes, at=-1, dtype=jnp.float32):
    """The rule of one equation of a function of arrays."""
    structs = [s if hasattr(s, "dtype") else jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    equation = jax.make_jaxpr(function)(*structs).eqns[at]
    while equation.primitive.name == "jit":
        equation = equation.params["jaxpr"].eqns[-1]
    return dimension_rule(equation)


def shared(rule, operand, axis, result, result_axis):
    """Whether an axis of an operand and one of a result have the same factors."""
    return rule.operands[operand][axis] == rule.results[result][result_axis]


def test_a_product_has_batch_contracted_and_free_axes():
    factors = rule(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (2, 3, 4), (2, 4, 5))
    (contracted,) = factors.reduced
    assert factors.operands[0][2] == factors.operands[1][1] == (contracted,)
    assert shared(factors, 0, 0, 0, 0)
    assert shared(factors, 1, 0, 0, 0)
    assert shared(factors, 0, 1, 0, 1)
    assert shared(factors, 1, 2, 0, 2)


@pytest.mark.parametrize(
    ("before", "after", "operand", "result"),
    [
        ((8, 6), (48,), ((0,), (1,)), ((0, 1),)),
        ((48,), (8, 6), ((0, 1),), ((0,), (1,))),
        ((4, 6), (8, 3), ((0,), (1, 2)), ((0, 1), (2,))),
        ((2, 1, 3), (2, 3, 1), ((0,), (), (1,)), ((0,), (1,), ())),
    ],
)
def test_reshape_splits_and_merges(before, after, operand, result):
    factors = rule(lambda x: x.reshape(after), before)
    assert (factors.operands[0], factors.results[0]) == (operand, result)
    assert not factors.unsharded


@pytest.mark.parametrize(
    ("function", "axis"),
    [
        (lambda x: lax.sort(x, dimension=1), 1),
        (lambda x: lax.cumsum(x, axis=0), 0),
        (lambda x: lax.rev(x, (1,)), 1),
        (lambda x: lax.slice(x, (0, 0), (4, 2)), 1),
        (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0))), 1),
        (lambda x: lax.top_k(x, 2), 1),
        (lambda x: lax.concatenate([x, x], 0), 0),
        (lambda x: lax.split(x, (2, 2), axis=0), 0),
        (lambda x: lax.fft(x.astype(jnp.complex64), "FFT", (6,)), 1),
        (lambda x: lax.reduce_window(x, 0.0, lax.max, (1, 2), (1, 2), "VALID"), 1),
    ],
)
def test_axes_that_are_gathered(function, axis):
    factors = rule(function, (4, 6))
    assert factors.operands[0][axis][0] in factors.unsharded
    assert factors.operands[0][1 - axis][0] not in factors.unsharded


def test_a_primitive_without_a_rule_is_unsharded_and_listed():
    strange = Primitive("strange")
    strange.def_abstract_eval(lambda x: x)

    program = jax.make_jaxpr(lambda x: lax.scan(lambda h, _: (strange.bind(h), None), x, None, 3))(
        jnp.ones((4, 4))
    )
    assert primitives(program) == {"scan": 1, "strange": 1}
    assert not has_rule("strange")
    inner = program.eqns[0].params["jaxpr"].jaxpr.eqns[0]
    assert dimension_rule(inner).unsharded == {0, 1, 2, 3}
