"""Random bits written out: the same bits, and no memory beside what is made of them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.jax_bridge.random_bits import write_out

SHAPE = (24, 40)
KEY = jax.random.key(5)


def names(jaxpr):
    """The primitives of a function and of those that it calls."""
    for step in jaxpr.eqns:
        yield step.primitive.name
        for value in step.params.values():
            for part in value if isinstance(value, tuple) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from names(inner)


def written(fn, *args):
    traced = jax.make_jaxpr(fn)(*args)
    assert "random_bits" in {*names(traced.jaxpr)}
    new = write_out(traced)
    return {*names(new.jaxpr)}, jax.jit(jaxpr_as_fun(new))(*jax.tree.leaves(args))


def looped(key):
    return jax.lax.scan(lambda key, _: (key, jax.random.normal(key, (3,))), key, None, length=2)[1]


def branched(key):
    draw, none = (lambda key: jax.random.normal(key, (4,))), (lambda key: jnp.zeros(4))
    return jax.lax.cond(jax.random.uniform(key, ()) < 2, draw, none, key)


def draw(key):
    return [
        *(jax.random.bits(key, SHAPE, f"uint{n}") for n in (8, 16, 32)),
        *(
            jax.random.bits(jax.random.fold_in(key, 3), shape, "uint32")
            for shape in ((), (3, 0), (2, 3, 5, 7))
        ),
        jax.random.normal(key, SHAPE, "bfloat16"),
        jax.checkpoint(lambda key: jax.random.normal(key, SHAPE))(key),
        looped(key),
        branched(key),
    ]


def test_the_same_values():
    found, results = written(draw, KEY)
    assert "random_bits" not in found
    for got, want in zip(results, jax.tree.leaves(jax.jit(draw)(KEY)), strict=True):
        assert got.dtype == want.dtype
        exact = jnp.issubdtype(want.dtype, jnp.integer)
        got, want = (np.asarray(one, np.float64) for one in (got, want))
        np.testing.assert_allclose(got, want, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-7)


def test_bits_of_64():
    with jax.enable_x64(True):
        found, [got] = written(lambda key: jax.random.bits(key, SHAPE, "uint64"), KEY)
        np.testing.assert_array_equal(got, jax.random.bits(KEY, SHAPE, "uint64"))
    assert "random_bits" not in found


def test_raw_keys_and_what_stays():
    raw = jax.random.PRNGKey(7)
    found, [got] = written(lambda key: jax.random.bits(key, SHAPE), raw)
    assert "random_bits" not in found
    np.testing.assert_array_equal(got, jax.random.bits(raw, SHAPE))
    several = jax.vmap(jax.random.bits)
    for key, draw in (
        (jax.random.key(0, impl="rbg"), jax.random.bits),
        (jax.random.split(KEY, 3), several),
    ):
        found, [got] = written(draw, key)
        assert "random_bits" in found
        np.testing.assert_array_equal(got, draw(key))
    with jax.threefry_partitionable(False):  # other counters
        found, [got] = written(lambda key: jax.random.bits(key, SHAPE), KEY)
        assert "random_bits" in found
        np.testing.assert_array_equal(got, jax.random.bits(KEY, SHAPE))


def test_a_function_that_is_called_twice_stays_one():
    def draw(key):
        first, second = jax.random.split(key)
        return jax.random.normal(first, SHAPE) + jax.random.normal(second, SHAPE)

    new = write_out(jax.make_jaxpr(draw)(KEY))
    calls = [step.params["jaxpr"] for step in new.jaxpr.eqns if "jaxpr" in step.params]
    normal = [called for called in calls if called.in_avals == calls[-1].in_avals]
    assert len(normal) == 2
    assert normal[0].jaxpr is normal[1].jaxpr


def test_a_model_that_is_one_array_needs_its_shards_only(counted):
    mesh = iso.make_mesh((2, 4), ("data", "model"))
    draw = jax.nn.initializers.lecun_normal(dtype=jnp.bfloat16)

    def make(key):
        return {"w": draw(key, (512, 768))}

    spec = P("data", "model")
    [array] = iso.create_sharded(make, mesh, iso.Plan({"w": spec}), KEY).values()
    shard = array.addressable_shards[0].data.nbytes
    assert array.sharding == NamedSharding(mesh, spec)
    assert shard == array.nbytes // 8
    assert shard <= counted("peak_bytes") < 1.01 * shard
    # As traced, the bits need several times the shard.
    traced = jax.jit(make, out_shardings={"w": array.sharding}).lower(KEY).compile()
    analysis = traced.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes > 2 * shard
    want = jax.jit(make)(KEY)["w"]
    np.testing.assert_allclose(
        np.asarray(array, np.float32), np.asarray(want, np.float32), rtol=1e-6, atol=1e-7
    )
