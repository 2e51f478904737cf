"""Masks that are added to the scores, and their gradients, against dense attention in float64."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from isoshard.core.domain.attention import ring_attention, ulysses_attention
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.transfer.place import shard
from tests.core.domain.attention import dense
from tests.core.domain.attention.test_uneven_attention import packed, unpacked

SPEC = ("data", "seq", "model")
AXES = {"axis": "seq", "batch": "data", "heads": "model"}


def drawn(shape):
    """Numbers of both signs, and some places of minus infinity."""
    random = np.random.default_rng(2)
    added = random.standard_normal(shape).astype(np.float32)
    return np.where(random.random(shape) < 0.15, -np.inf, added).astype(np.float32)


def run(attend, x, added, **given):
    """The result and four gradients, compared."""

    def function(q, k, v, mask):
        return attend(q, k, v, mask=mask, **given)

    found = dense.program(function)(*x, added)
    seen = dense.visible(*x[:2], given.get("causal", False))
    dense.check(found, dense.attention(*x, seen, added=added))


@pytest.mark.parametrize(
    ("shape", "causal"),
    [
        ((2, 4, 32, 32), False),  # whole
        ((1, 4, 32, 32), True),  # a position bias by head
        ((2, 1, 1, 32), False),  # a mask of keys, which goes round with them
        ((2, 1, 1, 32), True),  # and is moved with them for balance
        ((1, 1, 32, 1), False),
    ],
)
@pytest.mark.parametrize("attend", [ring_attention, ulysses_attention])
def test_shapes(attend, shape, causal):
    """Sums over the devices that have the same part of the mask are in the gradient."""
    mesh = make_mesh((2, 2, 2), SPEC)
    x = dense.arrays(key_heads=4 if attend is ulysses_attention else 2)
    run(attend, x, drawn(shape), mesh=mesh, causal=causal, tile=5, **AXES)


def test_a_ring_of_four_with_tiles_in_halves():
    """The mask of keys and its gradient travel, beside the halves of a device's own part."""
    mesh = make_mesh((4,), ("seq",))
    for shape in ((2, 4, 1, 32), (1, 1, 32, 32)):
        run(ring_attention, dense.arrays(), drawn(shape), mesh=mesh, axis="seq", tile=4)


def test_the_lowest_finite_number_is_no_infinity():
    """A row that has it everywhere is spread evenly, as a softmax does; half of it hides keys."""
    mesh = make_mesh((4,), ("seq",))
    added = np.where(np.arange(32) % 2 == 0, 0, np.finfo(np.float32).min)
    added = np.broadcast_to(added, (1, 1, 32, 32)).astype(np.float32).copy()
    added[..., 3, :] = np.finfo(np.float32).min
    x = dense.arrays()
    out = ring_attention(*x[:3], mesh=mesh, axis="seq", mask=jnp.asarray(added), tile=8)
    wanted = dense.attention(*x, dense.visible(*x[:2]), added=np.asarray(added, np.float32))[0]
    wanted[:, 3] = x[2].mean(1)
    np.testing.assert_allclose(out, wanted, **dense.CLOSE)


def test_in_double_precision_beside_half_precision(x64):
    """A mask of another float dtype keeps it in its gradient."""
    mesh = make_mesh((2,), ("seq",))
    x = [a.astype(np.float64) for a in dense.arrays(batch=1, queries=8)]
    added = np.random.default_rng(0).standard_normal((1, 1, 8, 8)).astype(np.float16)

    def function(q, k, v, mask):
        return ring_attention(q, k, v, mask=mask, mesh=mesh, axis="seq", tile=2)

    found = dense.program(function)(*x, added)
    wanted = dense.attention(*x, dense.visible(*x[:2]), added=added)
    dense.check(found[:4], wanted[:4], rtol=1e-12, atol=1e-12)
    assert found[4].dtype == jnp.float16
    np.testing.assert_allclose(found[4], wanted[4], rtol=2e-3, atol=1e-3)


def test_uneven_blocks():
    """What stands in the padding of the mask is not read, NaN neither."""
    sizes = (5, 2, 7, 4)
    x = dense.arrays(queries=18)
    added = drawn((1, 1, 18, 18))
    given = [packed(a, {1: sizes}) for a in x]
    mask = packed(added, {2: sizes, 3: sizes}, np.nan, (None, None, "seq"))

    def function(q, k, v, mask):
        return ring_attention(q, k, v, mask=mask, mesh=given[0].sharding.mesh, axis="seq", tile=4)

    found = dense.program(function)(*given, mask)
    wanted = dense.attention(*x, dense.visible(*x[:2]), added=added)
    dense.check([unpacked(u) for u in found[:4]], wanted[:4])
    got = np.asarray(found[4].array)[np.asarray(mask.mask())].reshape(18, 18)
    np.testing.assert_allclose(got, wanted[4][0, 0], **dense.CLOSE)


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")])
@pytest.mark.parametrize("balance", [True, False])
def test_the_order_in_which_the_axes_of_a_ring_are_named(axes, balance):
    mesh = make_mesh((2, 4), ("x", "y"))
    x = dense.arrays()
    function = functools.partial(
        ring_attention, mesh=mesh, axis=axes, causal=True, balance=balance, tile=2
    )
    found = dense.program(function)(*[shard(a, mesh, (None, axes)) for a in x])
    dense.check(found, dense.attention(*x, dense.visible(*x[:2], True)))
