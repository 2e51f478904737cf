"""What handlers say to each other, over several mesh axes in any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import make_mesh

SPEC = P(("y", "x"))


def on_blocks(handler, x, mesh, spec=SPEC, **options):
    routed = iso.domain.register_function_handler(lambda x: x, handler, check=False, **options)
    return routed(iso.shard(x, mesh, spec))


def test_devices_are_counted_as_blocks(mesh):
    def handler(shards, x):
        axes = shards.axes(x, 0)
        assert shards.count(axes) == 8 and shards.index(()).shape == ()
        behind = shards.permute(x, axes, 3), shards.permute(x, axes, -1)
        numbers = jnp.full(1, shards.index(axes)), shards.start(x, 0)[None]
        rest = shards.all_gather(x, axes)[None], shards.ring(x, body, axes, carry=none)[None]
        return (*numbers, *behind, *rest, shards.all_reduce(x, axes, "max")), (SPEC,) * 7

    def body(seen, block, source):
        return seen.at[source].add(block[0])

    none = jnp.zeros(8, int)
    index, start, three, back, whole, seen, largest = on_blocks(handler, np.arange(8), mesh)
    assert seen.tolist() == [list(range(8))] * 8 and largest.tolist() == [7] * 8
    assert index.tolist() == start.tolist() == list(range(8))
    assert three.tolist() == [5, 6, 7, 0, 1, 2, 3, 4]
    assert back.tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    assert whole.tolist() == [list(range(8))] * 8


def test_without_axes_nothing_is_sent(mesh):
    def handler(shards, x):
        own = shards.all_reduce(shards.all_gather(shards.permute(x, ()), ()), ())
        return shards.ring(own, lambda carry, block, source: carry + block, (), carry=x), SPEC

    assert on_blocks(handler, np.arange(8), mesh).tolist() == [*range(0, 16, 2)]


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_reductions_and_their_gradients(op, x64):
    mesh = make_mesh((4,), ("x",))
    x = np.array([3.0, 1.0, 5.0, 2.0, 5.0, 1.0, 4.0, 0.5])
    weights = np.array([2.0, 7.0])

    def handler(shards, x):
        return shards.all_reduce(x, "x", op), P()

    def plain(x):
        return getattr(jnp, op)(x.reshape(4, 2), axis=0)

    routed = iso.domain.register_function_handler(plain, handler)
    given = {"own": iso.shard(x, mesh, P("x")), "plain": x}
    with jax.set_mesh(mesh):
        found = {
            name: jax.value_and_grad(lambda x, f=f: (f(x) * weights).sum())(given[name])
            for name, f in (("own", routed), ("plain", plain))
        }
    np.testing.assert_allclose(found["own"][0], found["plain"][0])
    np.testing.assert_allclose(found["own"][1], found["plain"][1])


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        (lambda s, x: s.all_reduce(x, "z"), "no mesh axis is called 'z'; .* 'x' .2., 'y' .4."),
        (lambda s, x: s.permute(x, ("x", "q")), "no mesh axis is called 'q'"),
        (lambda s, x: s.all_reduce(x, "x", "prod"), "op 'prod' is none of 'sum', 'mean'"),
        (lambda s, x: s.axes(1, 0), "as the handler got them: 0; got 1"),
        (lambda s, x: s.axes(x + 1, 0), "got an array computed from others"),
        (lambda s, x: s.sizes(x, 1), r"shape \(8,\) has axes 0 to 0; got 1"),
        (lambda s, x: s.ring(x, lambda c, b, n: b[:0], "x", carry=x), "it must keep the structure"),
    ],
)
def test_errors(verb, message, mesh):
    with pytest.raises(ShardingError, match=message):
        on_blocks(lambda shards, x: (verb(shards, x), SPEC), np.arange(8), mesh)
