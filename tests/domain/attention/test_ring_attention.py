"""Ring attention against dense attention in float64, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError, SpecError, UnevenError
from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.transfer.device_put import shard
from isoshard.domain.attention import ring_attention, unzigzag, zigzag
from tests.domain.attention import dense

SPEC = ("data", "seq", "model")


def run(mesh, spec, x, dense_seen, factor=1.0, places=None, **given):
    """Compare one call, and say how the result and the gradients lie."""
    placed = [shard(a, mesh, places or spec) for a in x]
    axes = dict(zip(("batch", "axis", "heads"), spec, strict=False))
    found = dense.program(functools.partial(ring_attention, mesh=mesh, **axes, **given))(*placed)
    wanted = dense.attention(*x, dense_seen, given.get("scale"), factor)
    dense.check(found, wanted)
    for array, like in zip(found, (placed[0], *placed[:3]), strict=True):
        assert array.sharding.is_equivalent_to(like.sharding, 4)
    return found


def test_one_ring():
    x = dense.arrays(batch=1, queries=12, keys=6)
    seen = dense.visible(*x[:2], True)
    run(make_mesh((3,), ("s",)), (None, "s"), x, seen, causal=True, tile=2)


def test_key_heads_that_no_device_has_whole():
    """One for two devices."""
    x = dense.arrays(queries=16, key_heads=1, width=7, values=9)
    mesh = make_mesh((2, 2, 2), SPEC)
    placed = [shard(a, mesh, SPEC if a.shape[2] > 1 else (*SPEC[:2], None)) for a in x]
    axes = {"axis": "seq", "batch": "data", "heads": "model"}
    found = dense.program(functools.partial(ring_attention, mesh=mesh, **axes))(*placed)
    dense.check(found, dense.attention(*x, dense.visible(*x[:2])))
    for array, like in zip(found, (placed[0], *placed[:3]), strict=True):
        assert array.sharding.is_equivalent_to(like.sharding, 4)


def test_zigzag_order_without_balance():
    x = dense.arrays(batch=1, queries=8)
    mesh = make_mesh((2,), ("s",))
    given = {"mesh": mesh, "axis": "s"}
    placed = [zigzag(shard(a, mesh, (None, "s")), **given) for a in x]
    function = functools.partial(ring_attention, causal=True, order="zigzag", balance=False)
    found = dense.program(functools.partial(function, **given))(*placed)
    found = [unzigzag(a, **given) for a in found]
    dense.check(found, dense.attention(*x, dense.visible(*x[:2], True)))


def test_lengths_dropout_and_groups_of_heads_over_three_mesh_axes():
    """Dropout depends on global positions; a blind row gives 0, as its gradient."""
    x = dense.arrays(batch=4, queries=24, key_heads=2, width=5, values=3)
    lengths = {
        "query_seq_lengths": np.array([24, 15, 1, 0]),
        "key_value_seq_lengths": np.array([23, 5, 0, 24]),
    }
    key = jax.random.key(3)
    factor = dense.factors(*x[:2], 0.3, key)
    assert abs((factor > 0).mean() - 0.7) < 0.01
    seen = dense.visible(*x[:2], True, None, *lengths.values())
    more = {"causal": True, "scale": 0.3, "dropout": 0.3, "key": key}
    found = run(make_mesh((2, 2, 2), SPEC), SPEC, x, seen, factor, **more, **lengths)
    blind = ~seen.any(-1).transpose(0, 2, 1)
    assert blind.any()
    assert not np.asarray(found[0])[blind].any() and not np.asarray(found[1])[blind].any()


def test_a_raw_key_drops_the_same_as_a_typed_one():
    x = [jnp.asarray(a) for a in dense.arrays(batch=1, queries=4)[:3]]
    function = functools.partial(ring_attention, mesh=make_mesh((1,), ("s",)), axis="s")
    typed = function(*x, dropout=0.5, key=jax.random.key(7))
    raw = function(*x, dropout=0.5, key=jax.random.PRNGKey(7))
    np.testing.assert_array_equal(typed, raw)
    np.testing.assert_array_equal(function(*x, key=jax.random.key(7)), function(*x))


def test_other_dtypes(x64):
    mesh = make_mesh((2,), ("s",))
    function = functools.partial(ring_attention, mesh=mesh, axis="s")
    x = dense.arrays(batch=1, queries=16)
    wanted = dense.attention(*x, dense.visible(*x[:2]))
    for dtype, close in ((jnp.float64, 1e-12), (jnp.bfloat16, 5e-2)):
        found = dense.program(function)(*[shard(a.astype(dtype), mesh, (None, "s")) for a in x])
        assert {array.dtype for array in found} == {jnp.dtype(dtype)}
        found = [np.asarray(a).astype(np.float64) for a in found]
        dense.check(found, wanted, rtol=close, atol=close)


def test_inside_vmap_and_twice_differentiated():
    mesh = auto(make_mesh((2,), ("s",)))
    function = functools.partial(ring_attention, mesh=mesh, axis="s")
    given = dense.arrays(queries=8, heads=1, width=3)
    wanted = dense.attention(*given, dense.visible(*given[:2]))[0]
    x = [a[:, None] for a in given[:3]]
    q, k, v = (torch.tensor(a[0, 0, :, 0].astype(np.float64)) for a in x)
    q.requires_grad_()
    out = (q @ k.T / 3**0.5).softmax(1) @ v
    (slope,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    (want,) = torch.autograd.grad(slope.square().sum(), q)

    def curved(q, k, v):
        def loss(q):
            out = function(q, k, v)
            return (out**2).sum(), out

        def steep(q):
            slope, out = jax.grad(loss, has_aux=True)(q)
            return (slope**2).sum(), out

        return jax.grad(steep, has_aux=True)(q)

    with jax.set_mesh(mesh):
        curve, found = jax.jit(jax.vmap(curved))(*x)
    np.testing.assert_allclose(found[:, 0], wanted, **dense.CLOSE)
    np.testing.assert_allclose(curve[0, 0, :, 0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"axis": "z"}, SpecError, "no mesh axis is called 'z'.*'x' .2., 'y' .4."),
        ({"axis": ()}, SpecError, "axis names the mesh axes that split the sequence"),
        ({"axis": "x", "batch": "x"}, SpecError, "mesh axis 'x' is used twice"),
        ({"q": (2, 32, 4)}, ValueError, "each is .batch, sequence, heads, width."),
        ({"q": (2, 30, 4, 8)}, UnevenError, "q: a sequence of 30 .* over 4 devices. Pad it to 32"),
        (dict.fromkeys("qkv", (3, 32, 4, 8)) | {"batch": "x"}, UnevenError, "batch of 3 .* over 2"),
        ({"k": (2, 32, 3, 8), "v": (1, 32, 3, 8)}, ValueError, "batches; 4 heads .* multiple of 3"),
        ({"k": (2, 32, 4, 7), "v": (2, 28, 4, 8)}, ValueError, "in width; .* in length or heads"),
        ({"q": (2, 32, 6, 8), "heads": "x", "axis": "y"}, ValueError, "no multiple of 4 of keys"),
        ({"q": (2, 0, 4, 8)}, ValueError, "none may be empty"),
        ({"heads": "y", "axis": "x", "q": (2, 32, 2, 8), "k": (2, 32, 2, 8), "v": (2, 32, 2, 8)},
         UnevenError, "2 heads of queries and 2 of keys do not split over 4"),
        ({"mask": np.ones((1, 1, 32, 32), int)}, ValueError, "mask is int64, and needs bool"),
        ({"mask": np.ones((1, 1, 32, 31), bool)}, ValueError, r"not \(2, 4, 32, 32\) or 1 in"),
        ({"key_value_seq_lengths": np.ones(3)}, ValueError, r"one number per sample, \(2,\)"),
        ({"dropout": 1.0}, ValueError, "dropout is 1.0, and a share is at least 0 and below 1"),
        ({"dropout": 0.1}, ValueError, r"dropout needs key=jax.random.key"),
        ({"order": "stripes"}, ValueError, "order is 'natural' or 'zigzag', not 'stripes'"),
        ({"order": "zigzag", "k": (2, 28, 4, 8), "v": (2, 28, 4, 8)}, ShardingError,
         r"zigzag order: length \[28\] is no multiple of 8"),
        ({"causal": True, "balance": True, "mask": np.ones((1, 1, 32, 32), bool)}, ShardingError,
         "cannot balance: a mask with rows"),
        ({"tile": 0}, ValueError, "tile is 0, and needs at least 1"),
    ],
)  # fmt: skip
def test_mistakes(mesh, change, error, message):
    shapes = {name: change.pop(name, (2, 32, 4, 8)) for name in "qkv"}
    q, k, v = (jnp.asarray(np.zeros(shape, np.float32)) for shape in shapes.values())
    with pytest.raises(error, match=message):
        ring_attention(q, k, v, **({"mesh": mesh, "axis": "y"} | change))


def test_dtypes_that_do_not_fit(mesh):
    x = jnp.asarray(np.zeros((2, 32, 4, 8), np.float32))
    with pytest.raises(ValueError, match="float32, int32 and float32, and need one floating"):
        ring_attention(x, x.astype(int), x, mesh=mesh, axis="y")


def test_nothing_is_gathered_unasked(mesh):
    x = jnp.asarray(np.zeros((2, 32, 4, 8), np.float32))
    for spec, given in ((P(None, "x"), {}), (P("x", "y"), {"heads": "x"}), (P(None, None, "y"), {}),
                        (P(None, None, None, "x"), {})):  # fmt: skip
        placed = shard(x, mesh, spec)
        with pytest.raises(ShardingError, match=r"q is sharded as .* would be gathered"):
            ring_attention(placed, x, x, mesh=mesh, axis="y", **given)
    mask = shard(jnp.ones((1, 1, 32, 32), bool), mesh, P(None, None, None, "y"))
    with pytest.raises(
        ShardingError, match=r"mask is sharded as .* required as .*: axis 3 would be"
    ):
        ring_attention(x, x, x, mesh=mesh, axis="y", mask=mask)
    other = shard(x, make_mesh((4,), ("z",)), P(None, "z"))
    with pytest.raises(
        ShardingError, match=r"q is sharded as .* a mesh of 'z' .4., .* one of 'x' .2."
    ):
        ring_attention(other, x, x, mesh=mesh, axis="y")
    same = shard(x, make_mesh((8,), ("z",)), P(None, "z"))
    assert ring_attention(same, same, same, mesh=mesh, axis=("x", "y")).shape == x.shape
