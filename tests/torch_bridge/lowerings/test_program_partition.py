"""What the layouts of a program say together about how it is split."""

import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

from isoshard import P
from isoshard.torch_bridge.lowerings.program_partition import Partition, compiling_for, partition


@pytest.mark.parametrize(
    ("specs", "images", "partly"),
    [
        ((P("x"), P(None, "y")), False, False),
        ((P(), P(None, None, "y")), True, True),
        ((P(None, None, "x", "y"),), True, False),
        ((P("x", None, "y"),), True, False),
        ((P(None, None, ("x", "y")),), True, False),
        ((P(None, None, ("x", "y")), P(None, None, None, "x")), True, True),
    ],
)
def test_what_follows_from_layouts(mesh, specs, images, partly):
    with compiling_for([NamedSharding(mesh, spec) for spec in specs]):
        assert partition() == Partition(mesh, images, partly)
    assert partition() == Partition()


def test_nothing_is_split_by_whole_copies_or_on_one_device(mesh):
    one = SingleDeviceSharding(mesh.devices.flat[0])
    with compiling_for([NamedSharding(mesh, P()), one]):
        assert partition() == Partition(whole=True)


def test_it_is_forgotten_after_an_error(mesh):
    with pytest.raises(ZeroDivisionError), compiling_for([NamedSharding(mesh, P("x"))]):
        raise ZeroDivisionError
    assert partition().mesh is None
