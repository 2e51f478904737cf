"""Walking and rewriting jaxprs: the same in every JAX, at any depth, with constants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isoshard.core.runtime._jax_internals.jaxpr_classes import jaxpr_as_fun
from isoshard.core.runtime.flops import program_flops
from isoshard.core.runtime.jaxprs import (
    JaxprRewriter,
    closed,
    equations,
    evaluate,
    inlined,
    opened,
    programs,
    replaced,
    scan_counts,
)

TABLE = np.arange(4.0, dtype=np.float32)


@jax.jit
def _called(x):
    return jnp.sin(x) + TABLE


def _nested(x):
    """A call, a loop, two branches, a checkpointed function and a derivative of its own."""
    x = _called(_called(x))
    x, _ = jax.lax.scan(lambda c, row: (jnp.sin(c) + row, None), x, jnp.ones((3, 4)))
    x = jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
    return jax.checkpoint(jnp.sin)(x), jax.nn.relu(x)


@pytest.fixture(scope="module")
def program():
    return jax.make_jaxpr(_nested)(jnp.ones(4))


class _CosineForSine(JaxprRewriter):
    """Counts how often each program is rewritten."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def program(self, program, context=None):
        self.seen.append(id(program))
        return super().program(program, context)

    def equation(self, eqn, context):
        if eqn.primitive.name == "sin":
            (cosine,) = jax.make_jaxpr(jnp.cos)(eqn.invars[0].aval).eqns
            eqn = eqn.replace(primitive=cosine.primitive, params=cosine.params)
        yield self.inside(eqn, context)


def _names(program):
    return [eqn.primitive.name for eqn in equations(program)]


def test_every_depth_is_rewritten_and_computes_the_other_function(program):
    rewritten = _CosineForSine().program(program)
    assert _names(program).count("sin") >= 4 and "sin" not in _names(rewritten)
    assert len(_names(rewritten)) == len(_names(program)) and type(rewritten) is type(program)

    def expected(x):
        for _ in range(2):
            x = jnp.cos(x) + TABLE
        for _ in range(3):
            x = jnp.cos(x) + 1
        x = jnp.cos(x)
        return jnp.cos(x), jax.nn.relu(x)

    x = jnp.linspace(-1.0, 2.0, 4)
    for got, want in zip(jaxpr_as_fun(rewritten)(x), expected(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_what_does_not_change_is_the_same_object(program):
    assert JaxprRewriter().program(program) is program
    only = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, length=2)[0])(1.0)
    assert _CosineForSine().program(only) is only


def test_a_program_that_is_called_twice_is_rewritten_once(program):
    rewritten = _CosineForSine().program(program)
    calls = [eqn.params["jaxpr"] for eqn in rewritten.eqns if eqn.primitive.name == "jit"]
    before = [eqn.params["jaxpr"] for eqn in program.eqns if eqn.primitive.name == "jit"]
    assert before[0] is before[1] and calls[0] is calls[1]


def test_constants_stay(program):
    variables = opened(program)
    inner = replaced(program, outvars=variables.outvars[:1])
    assert list(inner.consts) == list(program.consts)
    assert len(opened(inner).outvars) == 1
    traced = jax.make_jaxpr(lambda x: x + jnp.asarray(TABLE))(jnp.ones(4))
    again = closed(opened(traced), traced.consts)
    np.testing.assert_array_equal(jaxpr_as_fun(again)(jnp.ones(4))[0], TABLE + 1)


@pytest.mark.parametrize(("consts", "carry"), [(0, 0), (2, 3)])
def test_a_scan_says_what_its_operands_are(consts, carry):
    def function(fixed, start, rows):
        def step(carried, row):
            return [x + sum(fixed, row) for x in carried], row

        return jax.lax.scan(step, start, rows)

    fixed, start = ([jnp.ones(())] * count for count in (consts, carry))
    program = jax.make_jaxpr(function)(fixed, start, jnp.ones(3))
    (loop,) = [eqn for eqn in program.eqns if eqn.primitive.name == "scan"]
    assert scan_counts(loop.params) == (consts if carry else 0, carry)


def test_a_program_is_evaluated_as_it_is_and_by_a_rule_of_ones_own(program):
    x = jnp.linspace(-1.0, 2.0, 4)
    for got, want in zip(evaluate(program, [x]), _nested(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)

    def depth(eqn, operands):
        return [1 + max(operands, default=0)] * len(eqn.outvars)

    plain = jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(x)) * x)(x)
    assert evaluate(plain, [0], depth, lambda constant: 0) == [3]


def test_calls_are_inlined_where_the_caller_says_so():
    square = jax.jit(lambda x: x * x)
    x = jnp.linspace(-1.0, 2.0, 4)
    program = jax.make_jaxpr(lambda x: square(square(x)) + x)(x)
    flat = inlined(program, lambda eqn: eqn.params.get("jaxpr"))
    assert _names(program).count("jit") == 2 and _names(flat) == ["mul", "mul", "add"]
    np.testing.assert_array_equal(evaluate(flat, [x])[0], x**4 + x)
    assert inlined(program, lambda eqn: None) is program


def test_each_program_inside_is_listed_once(program):
    found = [id(jaxpr) for jaxpr in programs(program)]
    assert len(found) == len(set(found)) and found[0] == id(opened(program))
    assert {
        id(opened(eqn.params["jaxpr"])) for eqn in program.eqns if "jit" in str(eqn.primitive)
    } <= set(found)


def test_flops_count_iterations_and_the_branch_that_computes_most():
    def step(w, x):
        x, _ = jax.lax.scan(lambda h, row: (h @ row, None), x, w)
        return jax.lax.cond(x[0, 0] > 0, lambda y: y @ y, lambda y: y @ y @ y, x)

    program = jax.make_jaxpr(jax.jit(step))(jnp.ones((3, 4, 4)), jnp.ones((4, 4)))
    assert program_flops(program) == (3 + 2) * 2 * 4**3 + 1  # and the comparison
