"""Attention by all-to-all against dense attention in float64, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import collectives
from isoshard.core.errors import UnevenError
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.transfer.device_put import shard
from isoshard.domain.attention import ulysses_attention
from tests.domain.attention import dense

SPEC = ("data", "seq", "model")
AXES = {"axis": "seq", "batch": "data", "heads": "model"}


def test_against_dense():
    x, causal = dense.arrays(heads=8, key_heads=4, values=5), True
    mesh = make_mesh((2, 2, 2), SPEC)
    placed = [shard(a, mesh, SPEC) for a in x]
    function = functools.partial(ulysses_attention, mesh=mesh, causal=causal, tile=8, **AXES)
    found = dense.program(function)(*placed)
    dense.check(found, dense.attention(*x, dense.visible(*x[:2], causal)))
    for array, like in zip(found, (placed[0], *placed[:3]), strict=True):
        assert array.sharding.is_equivalent_to(like.sharding, 4)


def test_masks_lengths_and_dropout():
    x = dense.arrays(heads=8)
    key = jax.random.key(3)
    mask = np.random.default_rng(1).random((2, 8, 1, 32)) < 0.6
    lengths = (np.array([32, 9]), np.array([7, 30]))
    mesh = make_mesh((1, 4, 2), SPEC)
    given = {"mask": mask, "query_seq_lengths": lengths[0], "key_value_seq_lengths": lengths[1]}
    function = functools.partial(
        ulysses_attention, mesh=mesh, dropout=0.2, key=key, scale=0.4, **given, **AXES
    )
    found = dense.program(function)(*[shard(a, mesh, SPEC) for a in x])
    seen = dense.visible(*x[:2], False, mask, *lengths)
    dense.check(found, dense.attention(*x, seen, 0.4, dense.factors(*x[:2], 0.2, key)))


def test_each_array_moves_once():
    mesh = make_mesh((4,), ("seq",))
    x = [shard(a, mesh, (None, "seq")) for a in dense.arrays()]
    function = functools.partial(ulysses_attention, mesh=mesh, axis="seq")
    part = x[0].nbytes // 4
    text = jax.jit(function).lower(*x[:3]).compile().as_text()
    assert collectives.summarize(text) == {"all-to-all": (4, 4 * part)}
    text = dense.program(function).lower(*x).compile().as_text()
    assert collectives.summarize(text) == {"all-to-all": (8, 8 * part)}


def test_too_few_heads():
    x = jnp.zeros((1, 32, 6, 8))
    with pytest.raises(
        UnevenError, match="axis and heads: 6 heads of queries and 6 of keys do not"
    ):
        ulysses_attention(x, x, x, mesh=make_mesh((4,), ("s",)), axis="s")
