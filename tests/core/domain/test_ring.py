import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from isoshard.core.domain.blocks.ring import ring
from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.transfer.place import shard

RNG = np.random.default_rng(0)


def over(mesh, function, specs, out):
    run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out))
    return lambda x: run(shard(x, mesh, specs))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_block_comes_with_its_number(devices, reverse):
    mesh = make_mesh((devices,), ("x",))

    def local(x):
        def body(seen, block, source):
            return seen.at[source].add(block[0])

        return ring(x, body, "x", carry=jnp.zeros(devices), reverse=reverse)

    seen = over(mesh, local, P("x"), P("x"))(jnp.arange(1.0, devices + 1))
    np.testing.assert_array_equal(seen.reshape(devices, -1), [np.arange(1, devices + 1)] * devices)


def test_this_devices_block_comes_first_and_neighbours_follow():
    mesh = make_mesh((4,), ("x",))

    def local(x):
        def body(carry, block, source):
            turn, order = carry
            return turn + 1, order.at[turn].set(source)

        return ring(x, body, "x", carry=(0, jnp.zeros(4, int)))[1]

    order = over(mesh, local, P("x"), P("x"))(jnp.zeros(4)).reshape(4, 4)
    np.testing.assert_array_equal(order, (np.arange(4)[:, None] - np.arange(4)) % 4)


def test_gradients_of_a_product_over_two_mesh_axes(mesh, x64):
    a, b = RNG.normal(size=(8, 3)), RNG.normal(size=(16, 3))

    def local(a, blocks):
        def body(total, block, source):
            b, scale = block
            return total + scale * jnp.tanh(a @ b.T).sum(1)

        scale = jnp.ones(())
        return ring((blocks, scale), body, ("x", "y"), carry=jnp.zeros(a.shape[0]))

    both = ("x", "y")
    rows = jax.shard_map(local, mesh=mesh, in_specs=(P(both), P(both)), out_specs=P(both))
    weights = np.arange(8.0)

    def loss(rows):
        return lambda a, b: (rows(a, b) * weights).sum()

    laid = [shard(x, mesh, P(both)) for x in (a, b)]
    got = jax.jit(jax.value_and_grad(loss(rows), (0, 1)))(*laid)
    want = jax.value_and_grad(loss(lambda a, b: jnp.tanh(a @ b.T).sum(1)), (0, 1))(a, b)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-12), got, want)


def test_blocks_are_sent_one_time_less_than_there_are_devices():
    mesh = make_mesh((4,), ("x",))

    def local(x):
        return ring(x, lambda total, block, _: total + block.sum(), "x", carry=jnp.zeros(()))[None]

    jaxpr = jax.make_jaxpr(over(mesh, local, P("x"), P("x")))(jnp.zeros((8, 3)))
    text = str(jaxpr)
    assert text.count("ppermute") == 2  # the first turn, and the scan's
    assert "length=2" in text


def test_a_carry_of_another_form_is_refused():
    mesh = make_mesh((4,), ("x",))

    def local(x):
        return ring(x, lambda total, block, _: (total, block), "x", carry=jnp.zeros(()))

    with pytest.raises(ShardingError, match=r"got the carry float32\[\] and gave \('float32"):
        over(mesh, local, P("x"), P("x"))(jnp.zeros(8))


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")])
def test_several_axes_count_in_the_order_of_the_mesh(axes):
    mesh = make_mesh((2, 4), ("x", "y"))

    def local(x):
        def body(seen, block, source):
            return seen.at[source].add(block[0])

        return ring(x, body, axes, carry=jnp.zeros(8))

    seen = over(mesh, local, P(("x", "y")), P(("x", "y")))(jnp.arange(8.0))
    np.testing.assert_array_equal(seen.reshape(8, 8), np.tile(np.arange(8.0), (8, 1)))
