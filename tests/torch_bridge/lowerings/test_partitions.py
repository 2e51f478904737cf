"""What the layouts of a program say together: how it is split, and whether a sequence may be."""

import jax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

from isoshard import P, make_mesh
from isoshard.torch_bridge.lowerings.program_partition import Partition, compiling_for, partition
from isoshard.torch_bridge.lowerings.registry import lower, named
from isoshard.torch_bridge.lowerings.sequence_split import may_split, splitting

HEADS_APART = (4, 2, 16, 8)  # batch, heads, queries, width
ALONE = (1, 2, 16, 8)


def test_what_follows_from_layouts(mesh):
    """Whole copies and one device split nothing; all is forgotten afterwards and after errors."""
    for specs, images, partly in (
        ((P("x"), P(None, "y")), False, False),
        ((P(), P(None, None, "y")), True, True),
        ((P(None, None, "x", "y"),), True, False),
        ((P("x", None, "y"),), True, False),
        ((P(None, None, ("x", "y")),), True, False),
        ((P(None, None, ("x", "y")), P(None, None, None, "x")), True, True),
    ):
        with compiling_for([NamedSharding(mesh, spec) for spec in specs]):
            assert partition() == Partition(mesh, images, partly), specs
        assert partition() == Partition()
    one = SingleDeviceSharding(mesh.devices.flat[0])
    with compiling_for([NamedSharding(mesh, P()), one]):
        assert partition() == Partition(replicated=True)
    with pytest.raises(ZeroDivisionError), compiling_for([NamedSharding(mesh, P("x"))]):
        raise ZeroDivisionError
    assert partition().mesh is None


def test_inputs_by_which_a_sequence_is_split(mesh):
    for shape, spec, expected in (
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
    ):
        with splitting([(shape, NamedSharding(mesh, spec))], []):
            assert may_split(HEADS_APART, 24) is expected, (shape, spec)
        assert not may_split(HEADS_APART, 24)
    # Without a batch the first axis may be the sequence.
    with splitting([((16, 32), NamedSharding(mesh, P("y")))], []):
        assert may_split(ALONE, 16) and may_split(ALONE[1:], 16)
        assert not may_split((1, 2, 20, 8), 20) and not may_split(HEADS_APART, 16)


def test_marks_several_meshes_and_shards(mesh):
    """JAX compiles an operator that asks for its layout only where all are on one mesh."""
    for spec, expected in ((P("x"), False), (P("x", "y"), True), (P(None, None, "y"), True)):
        with splitting([], [NamedSharding(mesh, spec)]):  # marks have no shape
            assert may_split(HEADS_APART, 16) is expected
    split = NamedSharding(mesh, P("x", "y"))
    other = NamedSharding(make_mesh((8,), ("z",)), P("z"))
    with splitting([((4, 16), split), ((8, 8), other)], []):
        assert not may_split(HEADS_APART, 16)
    with splitting([((4, 16), SingleDeviceSharding(jax.devices()[0]))], []):
        assert not may_split(HEADS_APART, 16)

    def shards(x):
        assert not may_split(HEADS_APART, 16)
        return x

    with splitting([((4, 16), split)], []):
        jax.shard_map(shards, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(jax.numpy.ones(2))
        assert may_split(HEADS_APART, 16)


def test_an_operator_has_one_lowering():
    before = named("aten::relu")
    with pytest.raises(ValueError, match="aten::relu has a lowering already"):
        lower("aten::relu")(lambda x: x)
    assert named("aten::relu") is before
