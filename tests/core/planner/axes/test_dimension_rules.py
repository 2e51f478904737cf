"""Rules of primitives: which axes are the same dimension, and which cannot stay split."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

from isoshard.core.planner.axes.dimension_rules import dimension_rule, is_known, primitives


def rule(function, *shapes, at=-1, dtype=jnp.float32):
    """The rule of one equation of a function of arrays."""
    structs = [s if hasattr(s, "dtype") else jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    equation = jax.make_jaxpr(function)(*structs).eqns[at]
    while equation.primitive.name == "jit":
        equation = equation.params["jaxpr"].eqns[-1]
    return dimension_rule(equation)


def shared(found, operand, axis, result, place):
    """Whether an axis of an operand and one of a result have the same factors."""
    return found.operands[operand][axis] == found.results[result][place]


def index(shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def test_elementwise_axes_are_the_same():
    found = rule(jnp.add, (8, 4), (8, 4))
    assert found.operands == (((0,), (1,)), ((0,), (1,)))
    assert found.results == (((0,), (1,)),)
    assert not found.whole
    assert not found.reduced


def test_a_scalar_operand_has_no_axes():
    found = rule(lambda p, x, y: lax.select_n(p, x, y), jax.ShapeDtypeStruct((), bool), (3,), (3,))
    assert found.operands == ((), ((0,),), ((0,),))


def test_a_product_has_batch_contracted_and_free_axes():
    found = rule(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (2, 3, 4), (2, 4, 5))
    (contracted,) = found.reduced
    assert found.operands[0][2] == found.operands[1][1] == (contracted,)
    assert shared(found, 0, 0, 0, 0)
    assert shared(found, 1, 0, 0, 0)
    assert shared(found, 0, 1, 0, 1)
    assert shared(found, 1, 2, 0, 2)


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
    found = rule(lambda x: x.reshape(after), before)
    assert (found.operands[0], found.results[0]) == (operand, result)
    assert not found.whole


def test_reshape_without_a_common_divisor_is_whole():
    found = rule(lambda x: x.reshape(5, 8, 3), (5, 6, 4))
    assert shared(found, 0, 0, 0, 0)
    assert found.sizes[0] == 5
    inner = {one for axes in found.operands[0][1:] for one in axes}
    assert any(one in found.whole for one in inner)


def test_rows_by_index():
    found = rule(lambda table, at: table[at], (100, 16), index((4, 7)))
    assert found.operands[0][0][0] in found.reduced
    assert shared(found, 0, 1, 0, 2)
    assert shared(found, 1, 0, 0, 0)


def test_rows_added_by_index():
    found = rule(
        lambda table, at, rows: table.at[at].add(rows), (100, 16), index((4, 7)), (4, 7, 16)
    )
    assert shared(found, 0, 0, 0, 0)
    assert shared(found, 2, 2, 0, 1)
    assert {one for axis in found.operands[2][:2] for one in axis} == set(found.reduced)


def test_convolution():
    found = rule(
        lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (2, 8, 8, 3),
        (3, 1, 3, 5),
    )
    assert shared(found, 0, 0, 0, 0)
    assert shared(found, 1, 3, 0, 3)
    assert found.operands[0][3] == found.operands[1][2]
    assert found.operands[0][1][0] in found.whole
    assert found.operands[0][2][0] not in found.whole


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
def test_axes_that_cannot_stay_split(function, axis):
    found = rule(function, (4, 6))
    assert found.operands[0][axis][0] in found.whole
    assert found.operands[0][1 - axis][0] not in found.whole


def test_reduction_and_argmax():
    for function in (lambda x: lax.argmax(x, 1, jnp.int32), lambda x: jnp.sum(x, 1)):
        found = rule(function, (4, 6))
        assert found.operands[0][1][0] in found.reduced
        assert shared(found, 0, 0, 0, 0)


def test_product_of_groups():
    found = rule(lax.ragged_dot, (12, 6), (3, 6, 5), index((3,)))
    assert shared(found, 0, 0, 0, 0)
    assert shared(found, 1, 2, 0, 1)
    assert found.operands[0][1][0] in found.reduced
    assert found.operands[1][0][0] in found.whole


def test_an_unknown_primitive_is_whole_and_listed():
    strange = Primitive("strange")
    strange.def_abstract_eval(lambda x: x)

    program = jax.make_jaxpr(lambda x: lax.scan(lambda h, _: (strange.bind(h), None), x, None, 3))(
        jnp.ones((4, 4))
    )
    assert primitives(program) == {"scan": 1, "strange": 1}
    assert not is_known("strange")
    inner = program.eqns[0].params["jaxpr"].jaxpr.eqns[0]
    assert dimension_rule(inner).whole == {0, 1, 2, 3}


def test_every_axis_of_random_programs_adds_up():
    """Sizes of an axis's factors multiply to the axis."""

    def step(x, w):
        h = jax.nn.gelu(jnp.einsum("bsd,df->bsf", x, w))
        h = jnp.concatenate([h[:, 1:], h[:, :1]], 1).reshape(x.shape[0], -1, 4)
        return jax.nn.softmax(h, -1).cumsum(1).sum()

    program = jax.make_jaxpr(jax.grad(step, argnums=1))(jnp.ones((2, 6, 8)), jnp.ones((8, 16)))

    def check(jaxpr):
        for equation in jaxpr.eqns:
            found = dimension_rule(equation)
            for axes, one in zip(
                (*found.operands, *found.results),
                (*equation.invars, *equation.outvars),
                strict=True,
            ):
                for factors, size in zip(axes, one.aval.shape, strict=True):
                    made = 1
                    for factor in factors:
                        made *= found.sizes[factor]
                    assert made >= size
            for value in equation.params.values():
                if hasattr(value, "jaxpr"):
                    check(value.jaxpr)

    check(program.jaxpr)
    assert all(map(is_known, primitives(program)))
