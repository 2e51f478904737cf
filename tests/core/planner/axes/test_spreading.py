"""Layouts of all values, from those of inputs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import make_mesh
from isoshard.core.planner.axes.factor_layouts import BOTH, agreed, by_axis, by_factor
from isoshard.core.planner.axes.flat_program import flattened
from isoshard.core.planner.axes.spreading import ArrayLayouts, spread


@pytest.fixture
def mesh():
    return make_mesh((4, 2), ("x", "y"), axis_types=AxisType.Auto)


def laid(function, mesh, *inputs):
    """Layouts of a function's results, by names of mesh axes."""
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in inputs]
    flat = flattened(jax.make_jaxpr(function)(*structs))
    layouts = ArrayLayouts(dict(mesh.shape))
    given = {
        value: layouts.of_spec(spec, len(shape))
        for value, (shape, spec) in zip(flat.inputs, inputs, strict=True)
    }
    found = spread(flat, layouts, given)
    return [tuple("".join(layouts.axes(split)) for split in found[value]) for value in flat.results]


def test_forward_through_a_product(mesh):
    found = laid(jnp.matmul, mesh, ((8, 16), P("x")), ((16, 4), P(None, "y")))
    assert found == [("x", "y")]


def test_a_mesh_axis_splits_one_axis_of_an_array(mesh):
    """Rows of the larger operand win."""
    assert laid(jnp.matmul, mesh, ((64, 16), P("x")), ((16, 4), P(None, "x"))) == [("x", "")]
    assert laid(jnp.matmul, mesh, ((4, 16), P("x")), ((16, 64), P(None, "x"))) == [("", "x")]


def test_a_constraint_spreads_backward(mesh):
    def constrained(x):
        y = jnp.sin(x * 1.0)
        z = lax.with_sharding_constraint(jnp.cos(y), NamedSharding(mesh, P(None, "y")))
        return y, z

    assert laid(constrained, mesh, ((8, 8), P())) == [("", "y"), ("", "y")]


def test_reshape_and_transpose(mesh):
    found = laid(lambda x: (x.reshape(4, 2, 16), x.T), mesh, ((8, 16), P("x", "y")))
    assert found == [("x", "", "y"), ("y", "x")]


def test_a_scan_carries_and_stacks(mesh):
    def loop(x, w):
        return lax.scan(lambda h, one: (h @ one, h), x, w)

    found = laid(loop, mesh, ((8, 16), P("x")), ((3, 16, 16), P()))
    assert found == [("x", ""), ("", "x", "")]


def test_what_is_carried_learns_from_the_body(mesh):
    def loop(w):
        def body(h, one):
            return lax.with_sharding_constraint(h + one, NamedSharding(mesh, P("y"))), None

        return lax.scan(body, jnp.zeros((8, 16)), w)[0]

    assert laid(loop, mesh, ((3, 8, 16), P())) == [("y", "")]


def test_calls_and_branches(mesh):
    def chosen(x):
        return lax.cond(True, jax.jit(jnp.sin), jax.checkpoint(jnp.cos), x)

    assert laid(chosen, mesh, ((8, 16), P("x"))) == [("x", "")]


def test_factors_of_an_axis():
    axes = ((0, 1), (2,))
    splits, rest = by_factor(axes, ((0, 1), ()), (4, 6, 5), (4, 2))
    assert (splits, rest) == ({0: (0,), 1: (1,), 2: ()}, set())
    assert by_axis(axes, splits, (4, 6, 5), (4, 2)) == ((0, 1), ())
    assert by_axis(axes, {1: (1,)}, (4, 6, 5), (4, 2)) == ((), ())


def test_what_is_closed_does_not_change():
    flat = flattened(jax.make_jaxpr(jnp.add)(jnp.ones((8, 8)), jnp.ones((8, 8))))
    rule = flat.scope.ops[0].rule
    operands = [(((0,), ()), 3), (((), ()), 3)]
    found, result = agreed(rule, [BOTH, BOTH], operands, [(((), ()), 0)], (4, 2))
    assert found == (((0,), ()), ((), ()))
    assert result == (((0,), ()),)
