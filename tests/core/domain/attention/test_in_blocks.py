"""Attention inside lifted functions: of blocks of any sizes, in a ring."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isoshard.core.domain import lift
from isoshard.core.domain.attention.partitioned_attention import Attention
from isoshard.core.domain.attention.uneven_attention import attend_in_blocks, gradients_in_blocks
from isoshard.core.domain.lifting.in_blocks import in_blocks
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.transfer.place import shard
from tests.core.domain.attention import dense
from tests.core.domain.attention.test_partitioned_attention import arrays, wanted

MESH = make_mesh((2, 4), ("data", "seq"))
SPEC = ("data", None, "seq")


def lifted(told):
    """The result and the gradients, by the rules of blocks."""
    attend = in_blocks(told, functools.partial(attend_in_blocks, told))
    back = in_blocks(told.gradients, functools.partial(gradients_in_blocks, told))

    def both(q, k, v, dout, mask):
        out, log = attend(q, k, v, mask)
        delta = (out * dout).sum(-1)
        return out, *back(dout, q, k, v, mask, log, delta)[:3]

    return lift(both)


def packed(x, sizes):
    found = shard(x, MESH, SPEC, uneven="pad", sizes=(None, None, sizes, None))
    hidden = jnp.where(found.mask(), found.array, np.nan)
    return UnevenArray(jax.device_put(hidden, found.sharding), found.shape, found.sizes)


def unpacked(u):
    blocks = np.split(np.asarray(u.array), len(u.sizes[2]), 2)
    return np.concatenate([b[:, :, :n] for b, n in zip(blocks, u.sizes[2], strict=True)], 2)


@pytest.mark.parametrize(
    ("queries", "keys", "masked"),
    [
        ((5, 2, 7, 4), (5, 2, 7, 4), "no"),
        ((0, 3, 9, 6), (5, 5, 5, 3), "rows"),
        ((5, 2, 7, 4), (0, 3, 9, 6), "keys"),
    ],
)
def test_a_ring_in_a_lifted_function(queries, keys, masked):
    """NaN in the padding is not read; nothing is gathered along the sequence."""
    x = arrays(2, queries=18, key_heads=2)
    shape = {"no": None, "rows": (4, 18, 18), "keys": (2, 1, 1, 18)}[masked]
    random = np.random.default_rng(1)
    mask = None if shape is None else random.standard_normal(shape).astype(np.float32)
    given = [packed(a, s) for a, s in zip(x, (queries, keys, keys, queries), strict=True)]
    told = Attention(masked != "rows", 8**-0.5, tile=4)
    function = lifted(told)
    compiled = jax.jit(function).lower(*given, mask).compile()
    found = compiled(*given, mask)
    dense.check([unpacked(u) for u in found], wanted(x, mask, masked != "rows")[0])
    text = compiled.as_text()
    assert "collective-permute" in text and "all-gather" not in text


def test_what_is_declined_is_computed_as_it_stands():
    """Keys that are whole, and heads in blocks."""
    x = arrays(2, queries=18)
    told = Attention(False, 8**-0.5)
    u = packed(x[0], (5, 2, 7, 4))
    assert attend_in_blocks(told, u, *x[1:3], None) is NotImplemented
    other = packed(x[1], (7, 2, 5, 4))
    assert attend_in_blocks(told, u, u, other, None) is NotImplemented
    heads = shard(x[1], MESH, (None, "seq"), uneven="pad", sizes=(None, (2, 1, 1, 0), None, None))
    assert attend_in_blocks(told, heads, heads, heads, None) is NotImplemented
    delta = jnp.zeros((2, 4, 18))
    assert gradients_in_blocks(told, u, u, u, u, None, delta, delta) is NotImplemented
    found = lifted(told)(u, *x[1:], None)
    dense.check([unpacked(v) if isinstance(v, UnevenArray) else v for v in found], wanted(x)[0])


def test_jax_differentiates_the_rule():
    x = arrays(2, queries=18)
    told = Attention(True, 8**-0.5, tile=4)
    attend = in_blocks(told, functools.partial(attend_in_blocks, told))
    loss = lift(lambda q, k, v, dout: (attend(q, k, v, None)[0] * dout).sum())
    given = [packed(a, (5, 2, 7, 4)) for a in x]
    found = jax.jit(jax.grad(loss, (0, 1, 2)))(*given)
    dense.check([x[3], *map(unpacked, found)], [x[3], *wanted(x, causal=True)[0][1:]])
