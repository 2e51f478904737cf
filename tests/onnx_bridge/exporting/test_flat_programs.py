"""Programs written out: the same numbers, every layout met, what has no place in a file refused."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from isoshard import P
from isoshard.core.layout.axis_types import is_typed
from isoshard.onnx_bridge import ModelError
from isoshard.onnx_bridge.exporting.flat_programs import flat_program
from tests.onnx_bridge.exporting.jax_models import laid

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
CALLS = {"jit", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call", "scan"}


@pytest.fixture
def rows(mesh):
    return NamedSharding(mesh, P("x"))


@jax.custom_vjp
def cube(x):
    return x**3


cube.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x * x * g,))


def _sums(c, x):
    return c + x, (c * x, c)


FUNCTIONS = {
    "jit in jit": lambda x: jax.jit(lambda a: jax.nn.silu(a) + 1)(x),
    "checkpoint": jax.checkpoint(lambda x: jnp.tanh(x).sum(0)),
    "custom_jvp": jax.nn.relu,
    "custom_vjp": cube,
    "gradient": lambda x: jax.grad(lambda a: cube(a).sum())(x),
    "scan": lambda x: jax.lax.scan(_sums, jnp.zeros(6), x),
    "scan backwards": lambda x: jax.lax.scan(_sums, jnp.zeros(6), x, reverse=True),
    "scan of no turns": lambda x: jax.lax.scan(_sums, jnp.zeros(6), x[:0]),
    "scan over nothing": lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3),
    "fori_loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, a: a + i, x),
    "constants and inputs": lambda x: (x, jnp.ones(2), x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_are_written_out(name):
    program = flat_program(FUNCTIONS[name], [X])
    assert not CALLS & {step.primitive.name for step in program.steps}
    wanted = jax.tree.leaves(FUNCTIONS[name](jnp.asarray(X)))
    found = program(*(X for _ in program.read))
    assert program.results == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_what_nothing_depends_on_is_left_out():
    program = flat_program(lambda a, b, c: (a + 1, jnp.sin(b))[0] + c, [X, X, X])
    assert program.read == (0, 2)
    assert [step.primitive.name for step in program.steps] == ["add", "add"]


def test_the_layouts_of_constraints_in_order(mesh, rows):
    columns = NamedSharding(mesh, P(None, "x"))

    @jax.jit
    def inner(x):
        return laid(x * 2, columns)

    def fn(x):
        x = laid(x, rows)
        return inner(x) + 1

    program = flat_program(fn, [X])
    assert program.layouts == (rows, columns)
    for found, wanted in zip(program(X), (2 * X + 1, X, 2 * X), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_constraint_in_a_scan_is_one_for_each_turn(rows):
    def turn(x, _):
        return laid(x + 1, rows), None

    program = flat_program(lambda x: jax.lax.scan(turn, x, None, length=3)[0], [X])
    assert program.layouts == (rows,) * 3
    np.testing.assert_allclose(program(X)[1:], [X + 1, X + 2, X + 3])


def test_what_jit_says_of_its_arguments_and_results(mesh, rows):
    columns = NamedSharding(mesh, P(None, "x"))
    inner = jax.jit(jnp.sin, in_shardings=columns)
    fn = jax.jit(lambda x: inner(x + 1), in_shardings=rows, out_shardings=rows)
    program = flat_program(fn, [X])
    assert program.input_layouts == {0: rows}
    assert program.layouts == (columns, rows)


def test_what_cannot_be_written_is_told_at_once(mesh, rows):
    def body(x):
        return laid(x + 1, rows)

    def fn(x, key):
        x = x + jax.random.normal(key, x.shape)
        x = jax.shard_map(lambda a: a, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(laid(x, rows))
        return jax.lax.while_loop(lambda a: a.sum() < 0, body, x)

    with pytest.raises(ModelError) as error:
        flat_program(fn, [X, jax.random.key(0)])
    for told in ("random numbers", "shard_map: its body works on shards", "inside while"):
        assert told in str(error.value)


class TestExplicitAxes:
    @pytest.fixture
    def explicit(self):
        return jax.make_mesh((2, 4), ("x", "y"))

    def _of(self, fn, inputs, context=None):
        with contextlib.nullcontext() if context is None else jax.set_mesh(context):
            program = flat_program(fn, inputs)
            found = program(*inputs)
        assert len(found) == program.results + len(program.layouts)
        if context is None:
            wanted = jax.tree.leaves(fn(*inputs))
            for one, other in zip(found[: program.results], wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6)
        assert not any(is_typed(step.outvars[0].aval.sharding.mesh) for step in program.steps)
        return program, found

    def test_reshard_and_out_sharding_are_layouts(self, explicit):
        rows, wide = NamedSharding(explicit, P("x")), NamedSharding(explicit, P("x", "y"))

        def fn(x, w):
            x = jax.sharding.reshard(x, rows)
            return jnp.dot(x, w, out_sharding=wide) + jnp.ones(
                8, out_sharding=P("y")
            )  # of a constant

        w = np.linspace(-1, 1, 48, dtype=np.float32).reshape(6, 8)
        program, found = self._of(fn, [X, w], explicit)
        assert [one.spec for one in program.layouts] == [P("x"), P("x", "y")]
        np.testing.assert_allclose(found[0], X @ w + 1, rtol=1e-5)

    def test_open_sums_are_refused(self, explicit):
        a = jax.device_put(X, NamedSharding(explicit, P(None, "x")))
        b = jax.device_put(X.T, NamedSharding(explicit, P("x")))
        out = NamedSharding(explicit, P(unreduced={"x"}))
        with pytest.raises(ModelError, match=r"dot_general: .*unreduced=\{'x'\}.* leaves a sum"):
            flat_program(lambda a, b: jnp.dot(a, b, out_sharding=out), [a, b])

    def test_a_layout_in_a_loop_is_refused(self, explicit):
        rows = NamedSharding(explicit, P("x"))

        def turn(x):
            return jax.sharding.reshard(jnp.sin(x), rows)

        x = jax.device_put(X, rows)
        with pytest.raises(ModelError, match="reshard inside while: ONNX's loops have no layouts"):
            flat_program(lambda x: jax.lax.while_loop(lambda a: True, turn, x), [x])
