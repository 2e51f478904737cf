"""What cannot be: layouts that are not known, meshes that differ, results that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.errors import ShardingError, SpecError
from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.mesh import make_mesh
from isoshard.domain.handlers import ResultLayout

X = np.arange(8, dtype=np.float32)


@pytest.fixture
def line():
    return make_mesh((4,), ("x",))


def double(returned):
    """`x * 2` with a handler that returns something."""
    return iso.domain.register_function_handler(lambda x: x * 2, returned)


@pytest.mark.parametrize(
    ("returned", "kind", "message"),
    [
        (lambda s, x: x, ShardingError, r"returned a \w+; it returns a pair"),
        (lambda s, x: (x, P("x"), 1), ShardingError, "returned a tuple of 3"),
        (lambda s, x: ((x, x), (P("x"),)), ShardingError, "one spec for each array"),
        (lambda s, x: (x, P("z")), SpecError, "no mesh axis is called 'z'"),
        (lambda s, x: (x, P("x", "x")), SpecError, "used 2 times; it has 2 entries"),
        (lambda s, x: (x[:1], P("x")), ShardingError, r"float32\[4\] in all.* gives float32\[8\]"),
        (lambda s, x: (x.astype(int), P("x")), ShardingError, "a wrong local shape or dtype"),
        (lambda s, x: ((x, x), (P("x"),) * 2), ShardingError, "results of the structure"),
        (lambda s, x: (x[:1], s.like(x, 0)), ShardingError, r"local shape \(1,\) is wrong: axis 0"),
        (lambda s, x: (x, s.uneven(P("x"), [(2, 2, 4)])), ShardingError, "for 4 shards"),
        (lambda s, x: (x, s.uneven(P("x"), [(2, 2, 3, 1)])), ShardingError, "takes 0 to 2"),
        (lambda s, x: (x, ResultLayout(P("x"), (None, None))), ShardingError, "are for 2 axes"),
        (lambda s, x: (x, P()), ShardingError, "JAX cannot prove it .*reduce it with shards"),
    ],
)
def test_results_that_do_not_fit(returned, kind, message, line):
    routed = iso.domain.register_function_handler(
        lambda x: x[:2] * 2 if message.startswith("JAX") else x * 2, returned
    )
    with pytest.raises(kind, match=message):
        routed(iso.shard(X, line, P("x")))


def test_layouts_that_jit_hides(line):
    routed = double(lambda shards, x: (x * 2, shards.like(x, 0)))
    x = iso.shard(X, line, P("x"))
    hidden = iso.reshard(x, auto(line), P("x"))  # a type would tell
    with pytest.raises(ShardingError, match=r"argument 0 is traced, .* <lambda>.over"):
        jax.jit(routed)(hidden)
    np.testing.assert_array_equal(jax.jit(routed.over(line, ("x",)))(x), X * 2)


def test_what_is_said_must_be_so(line, mesh):
    routed = double(lambda shards, x: (x * 2, shards.like(x, 0)))
    x = iso.shard(X, line, P("x"))
    with pytest.raises(
        ShardingError, match=r"argument 0 is sharded as P\('x',\) .* and over\(\) declares"
    ):
        routed.over(line, None)(x)
    with pytest.raises(
        ShardingError, match=r"over\(\) declares P\('x',\) over 'x' \(2\), 'y' \(4\)"
    ):
        routed.over(mesh, ("x",))(x)
    with pytest.raises(ShardingError, match="argument 1, argument 'y', which the call does"):
        routed.over(line, ("x",), ("x",), y=("x",))(x)
    with pytest.raises(SpecError, match=r"argument 0: spec .* no mesh axis is called 'q'"):
        routed.over(line, ("q",))(x)


def test_meshes_that_differ(line, mesh):
    add = iso.domain.register_function_handler(
        jnp.add, lambda shards, a, b: (a + b, shards.like(a, 0))
    )
    a, b = iso.shard(X, line, P("x")), iso.shard(X, mesh, P("x"))
    with pytest.raises(
        ShardingError, match=r"2 different meshes: argument 0 on 'x' .4.; argument 1"
    ):
        add(a, b)
    elsewhere = jax.device_put(X, jax.devices()[5])
    with pytest.raises(ShardingError, match=r"argument 1 is on .*5 alone"):
        add(a, elsewhere)


def test_arguments_that_cannot_be(line):
    routed = double(lambda shards, x, rest=None: (x * 2, shards.like(x, 0)))
    with pytest.raises(TypeError, match="argument 1 is a bytearray, which is neither an array"):
        routed(iso.shard(X, line, P("x")), bytearray(2))
    with pytest.raises(TypeError, match="the handler given is a int"):
        iso.domain.register_function_handler(jnp.dot, 3)


def test_a_function_that_cannot_be_traced(line):
    def counted(x):
        return x * 2 if float(x.sum()) > 0 else x

    def handler(shards, x):
        return x * 2, shards.like(x, 0)

    x = iso.shard(X, line, P("x"))
    with pytest.raises(ShardingError, match=r"counted cannot be traced .* with check=False"):
        iso.domain.register_function_handler(counted, handler)(x)
    routed = iso.domain.register_function_handler(counted, handler, check=False)
    np.testing.assert_array_equal(routed(x), X * 2)
