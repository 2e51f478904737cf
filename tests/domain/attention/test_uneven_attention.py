"""Blocks of any size, empty ones too: what stands in their padding is never read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isoshard.core.errors import ShardingError, UnevenError
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.layout.uneven import UnevenArray
from isoshard.domain.attention import ring_attention, ulysses_attention
from tests.domain.attention import dense
from tests.domain.blocks import in_blocks
from tests.domain.blocks import out_of_blocks as unpacked

MESH = make_mesh((2, 4), ("data", "seq"))


def packed(x, axes, fill=np.nan, spec=("data", "seq")):
    """An UnevenArray with blocks of these sizes along some axes, the padding filled."""
    return in_blocks(x, MESH, spec, [axes.get(axis) for axis in range(x.ndim)], fill)


@pytest.mark.parametrize(
    ("attend", "causal", "queries", "keys"),
    [
        (ring_attention, True, (0, 3, 9, 6), (5, 5, 5, 3)),
        (ulysses_attention, True, (0, 3, 9, 6), (5, 5, 5, 3)),
    ],
)
def test_uneven_blocks(attend, causal, queries, keys):
    """NaN in the padding of everything that comes in, the gradient of the result included."""
    x = dense.arrays(queries=18, keys=18)
    given = [packed(a, {1: s}) for a, s in zip(x, (queries, keys, keys, queries), strict=True)]
    function = functools.partial(attend, mesh=MESH, axis="seq", batch="data", causal=causal, tile=4)
    found = dense.program(function)(*given)
    wanted = dense.attention(*x, dense.visible(*x[:2], causal))
    dense.check([unpacked(u) for u in found], wanted)
    for u, like in zip(found, (given[0], *given[:3]), strict=True):
        assert u.sizes == like.sizes
        assert u.array.sharding.is_equivalent_to(like.array.sharding, 4)
        assert not np.asarray(u.array)[
            np.broadcast_to(~np.asarray(like.mask()), u.array.shape)
        ].any()


def test_uneven_mask_and_dropout():
    """The weights that dropout drops are those of the true positions."""
    sizes = (5, 2, 7, 4)
    x = dense.arrays(queries=18)
    mask = np.random.default_rng(1).random((1, 1, 18, 18)) < 0.7
    key = jax.random.key(5)
    seen = dense.visible(*x[:2], False, mask)
    wanted = dense.attention(*x, seen, None, dense.factors(*x[:2], 0.25, key))[0]
    given = [packed(a, {1: sizes}) for a in x]
    rows = packed(mask, {2: sizes, 3: sizes}, True, (None, None, "seq"))
    function = functools.partial(
        ring_attention, mesh=MESH, axis="seq", mask=rows, dropout=0.25, key=key, tile=4
    )
    np.testing.assert_allclose(unpacked(jax.jit(function)(*given[:3])), wanted, **dense.CLOSE)


def test_mistakes():
    x = [packed(a, {1: (5, 2, 7, 4)}) for a in dense.arrays(queries=18)]
    other = packed(dense.arrays(queries=18)[0], {1: (7, 7, 2, 2)})
    attend = functools.partial(ring_attention, mesh=MESH, axis="seq", batch="data")
    with pytest.raises(ShardingError, match=r"keys are in blocks of \(5, 2, 7, 4\), and values of"):
        attend(x[0], x[1], other)
    with pytest.raises(ShardingError, match="k: the sequence has 4 blocks, and its mesh axes 2"):
        ring_attention(x[0].array, x[1], x[2], mesh=MESH, axis="data")
    with pytest.raises(ShardingError, match=r"the mask is in blocks of .None, None, None, None."):
        attend(x[0], x[1], x[2], mask=np.ones((1, 1, 28, 28), bool))
    rows = packed(np.ones((1, 1, 18, 18), bool), {2: (5, 2, 7, 4), 3: (5, 2, 7, 4)}, True,
                  (None, None, "seq"))  # fmt: skip
    with pytest.raises(ShardingError, match=r"mask is sharded as .*: axis 2 would be gathered"):
        ulysses_attention(*x[:3], mesh=MESH, axis="seq", batch="data", mask=rows)
    with pytest.raises(ShardingError, match="cannot balance: uneven blocks have no halves"):
        attend(x[0], x[1], x[2], causal=True, balance=True)
    whole = UnevenArray(jnp.zeros((2, 18, 4, 8)), (2, 18, 4, 8), (None,) * 4)
    with pytest.raises(UnevenError, match="q: a sequence of 18 does not split over 4"):
        attend(whole, x[1], x[2])
    batches = UnevenArray(jnp.zeros((2, 4, 4, 8)), (1, 4, 4, 8), ((1, 0), *[None] * 3))
    with pytest.raises(ShardingError, match="q: only the sequence may be uneven"):
        ring_attention(batches, batches, batches, mesh=MESH, axis="seq")
