"""Masks that are added to the scores, and their gradients, against dense attention in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from isoshard.core.layout.mesh import make_mesh
from isoshard.domain.attention import ring_attention, ulysses_attention
from tests.domain.attention import dense
from tests.domain.attention.test_uneven_attention import packed
from tests.domain.blocks import out_of_blocks as unpacked

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
    ("attend", "shape", "causal"),
    [
        (ulysses_attention, (2, 4, 32, 32), False),  # whole
        (ring_attention, (2, 1, 1, 32), True),  # which goes round, and is moved for balance
    ],
)
def test_shapes(attend, shape, causal):
    """Sums over the devices that have the same part of the mask are in the gradient."""
    mesh = make_mesh((2, 2, 2), SPEC)
    x = dense.arrays(key_heads=4 if attend is ulysses_attention else 2)
    run(attend, x, drawn(shape), mesh=mesh, causal=causal, tile=5, **AXES)


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


def test_uneven_blocks():
    """What stands in the padding of the mask is not read, NaN neither."""
    sizes = (11, 7)
    x = dense.arrays(queries=18)
    added = drawn((1, 1, 18, 18))
    given = [packed(a, {1: sizes}, spec=(None, "data")) for a in x]
    mask = packed(added, {2: sizes, 3: sizes}, np.nan, (None, None, "data"))

    def function(q, k, v, mask):
        return ring_attention(q, k, v, mask=mask, mesh=given[0].sharding.mesh, axis="data")

    found = dense.program(function)(*given, mask)
    wanted = dense.attention(*x, dense.visible(*x[:2]), added=added)
    dense.check([unpacked(u) for u in found[:4]], wanted[:4])
    got = np.asarray(found[4].array)[np.asarray(mask.mask())].reshape(18, 18)
    np.testing.assert_allclose(got, wanted[4][0, 0], **dense.CLOSE)
