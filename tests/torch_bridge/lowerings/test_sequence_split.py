"""Which programs may split the sequence of an attention."""

import jax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

from isoshard import P, make_mesh
from isoshard.torch_bridge.lowerings.sequence_split import may_split, splitting

HEADS_APART = (4, 2, 16, 8)  # batch, heads, queries, width
ALONE = (1, 2, 16, 8)


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((4, 16), P("x", "y"), True),  # numbers of tokens
        ((4, 24), P("x", "y"), True),  # of those that are the keys
        ((32, 32), P("x", "y"), False),  # a weight by rows and columns
        ((4, 16, 32), P("x", "y"), True),  # embedded tokens
        ((16, 32), P("x"), False),  # the first axis is a batch
        ((4, 2, 16, 8), P("x", "y"), False),  # heads
        ((4, 2, 16, 8), P(None, None, "y"), True),
        ((4, 2, 16, 8), P(None, None, None, "y"), False),  # width
        ((4, 3, 64, 64), P("x", None, "y"), True),  # images, whose patches may be tokens
        ((4, 16, 32), P("x"), False),
        ((4, 16, 32), P(), False),
    ],
)
def test_inputs(mesh, shape, spec, expected):
    with splitting([(shape, NamedSharding(mesh, spec))], []):
        assert may_split(HEADS_APART, 24) is expected
    assert not may_split(HEADS_APART, 24)


def test_without_a_batch_the_first_axis_may_be_the_sequence(mesh):
    tokens = NamedSharding(mesh, P("y"))
    with splitting([((16, 32), tokens)], []):
        assert may_split(ALONE, 16) and may_split(ALONE[1:], 16)
        assert not may_split((1, 2, 20, 8), 20) and not may_split(HEADS_APART, 16)


def test_marks_have_no_shape(mesh):
    for spec, expected in ((P("x"), False), (P("x", "y"), True), (P(None, None, "y"), True)):
        with splitting([], [NamedSharding(mesh, spec)]):
            assert may_split(HEADS_APART, 16) is expected


def test_layouts_on_several_meshes_or_none(mesh):
    """JAX compiles an operator that asks for its layout only where all are on one mesh."""
    split = NamedSharding(mesh, P("x", "y"))
    other = NamedSharding(make_mesh((8,), ("z",)), P("z"))
    with splitting([((4, 16), split), ((8, 8), other)], []):
        assert not may_split(HEADS_APART, 16)
    with splitting([((4, 16), SingleDeviceSharding(jax.devices()[0]))], []):
        assert not may_split(HEADS_APART, 16)


def test_shards_are_no_sequences(mesh):
    split = NamedSharding(mesh, P("x", "y"))

    def shards(x):
        assert not may_split(HEADS_APART, 16)
        return x

    with splitting([((4, 16), split)], []):
        jax.shard_map(shards, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(jax.numpy.ones(2))
        assert may_split(HEADS_APART, 16)
