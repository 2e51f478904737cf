"""Shardy's layouts of a function's results are those that XLA compiles it to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.torch_bridge.interop.propagated_layouts import propagated

MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))


def struct(shape: tuple[int, ...], *spec, mesh=MESH) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


FUNCTIONS = {
    "product": (lambda a, b: a @ b, [struct((8, 4), "x"), struct((4, 8), None, "y")]),
    "two axes on one": (lambda a, b: jnp.sin(a) + b, [struct((8, 4), ("x", "y")), struct((4,))]),
    "contracted": (lambda a: a.T @ a, [struct((8, 4), "x")]),
    "turned": (lambda a: (a.T, a.sum(1), a[0]), [struct((8, 4), "x", "y")]),
    "reshaped": (lambda a: a.reshape(2, 4, 4), [struct((8, 4), ("x", "y"))]),
    "does not divide": (lambda a: a[:7] * 2, [struct((8, 4), "x", "y")]),
    "known of one": (
        lambda a, b: a * b,
        [jax.ShapeDtypeStruct((8, 4), jnp.float32), struct((8, 4), "y")],
    ),
    "constants": (lambda a: (jnp.arange(3), a, 1.0), [struct((8, 4), None, "x")]),
    "loop": (
        lambda a, w: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), a, w),
        [struct((8, 4), "x"), struct((3, 4, 4))],
    ),
    "shard_map": (
        lambda a: jax.shard_map(lambda a: a * 2, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(a),
        [struct((8, 4), None, "y")],
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_what_the_compiler_chooses(name):
    function, shapes = FUNCTIONS[name]
    flat = lambda *args: jax.tree.leaves(function(*args))  # noqa: E731
    found = propagated(flat, shapes)
    compiled = jax.jit(flat).lower(*shapes).compile()
    results = jax.tree.leaves(compiled.out_info)
    assert len(found) == len(results)
    for spec, result in zip(found, results, strict=True):
        want = result.sharding
        assert want.is_equivalent_to(NamedSharding(MESH, spec), len(result.shape)), (spec, want)


def test_no_devices_are_needed():
    mesh = AbstractMesh((64, 64), ("x", "y"))
    shapes = [struct((128, 64), "x", mesh=mesh), struct((64, 128), None, "y", mesh=mesh)]
    assert propagated(lambda a, b: [a @ b], shapes, "tpu") == [P("x", "y")]


def test_another_partitioner_is_refused():
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with pytest.raises(ShardingError, match=r"jax_use_shardy_partitioner is off.*out_sharding"):
            propagated(lambda a: [a], [struct((8,), "x")])
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
