import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError, UnrepresentableError
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.layout.op_sharding import parse_op_sharding, to_op_sharding
from isoshard.core.layout.tiles import Tiles
from tests.jax_faults import OF_JAX_9

SHAPES = [(1,), (6,), (8,), (1, 4), (2, 3), (4, 2), (1, 1, 8), (2, 1, 3), (1, 2, 4), (2, 2, 2)]


def specs_over(names, ndim):
    """Every spec: each choice and order of mesh axes, dealt to the tensor axes in every way."""
    for used in range(len(names) + 1):
        for order in itertools.permutations(names, used):
            for cuts in itertools.combinations_with_replacement(range(used + 1), ndim - 1):
                edges = (0, *cuts, used)
                yield P(*(order[a:b] or None for a, b in itertools.pairwise(edges)))


def _held(sharding, shape):
    """What JAX says each device holds, by position in the mesh, with plain bounds."""
    number = {device: i for i, device in enumerate(sharding.mesh.devices.flat)}
    return {
        number[device]: tuple(part.indices(size) for part, size in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }


@pytest.mark.parametrize("mesh_shape", SHAPES, ids=str)
def test_every_spec_agrees_with_jax_and_survives_all_notations(mesh_shape):
    mesh = make_mesh(mesh_shape, ("a", "b", "c")[: len(mesh_shape)])
    for ndim in (1, 2, 3):
        shape = (mesh.size * 2,) * ndim
        for spec in specs_over(mesh.axis_names, ndim):
            tiles = Tiles.from_spec(spec, mesh, ndim)
            sharding = NamedSharding(mesh, spec)
            mine = {
                device: tuple(part.indices(size) for part, size in zip(index, shape, strict=True))
                for device, index in tiles.slices(shape).items()
            }
            assert mine == _held(sharding, shape), spec
            hlo = str(sharding._to_xla_hlo_sharding(ndim))
            if mesh.size > 1 or not OF_JAX_9:  # which writes {replicated} for one device
                assert to_op_sharding(tiles, iota=True) == hlo, spec
            for text in (to_op_sharding(tiles), hlo):
                again = parse_op_sharding(text, ndim, num_devices=mesh.size)
                assert again == tiles, spec
                back = NamedSharding(mesh, again.to_spec(mesh))
                assert back.is_equivalent_to(sharding, ndim), spec


class TestConstruction:
    @pytest.mark.parametrize(
        ("grid", "devices", "what"),
        [
            ([[0, 1], [1, 2]], None, "device 1 is named 2 times"),
            ([[0, 5]], None, "there is no device 5"),
            ([[-1, 0]], None, "there is no device -1"),
            ([[3]], 3, "there is no device 3"),
            ([[0.0, 1.0]], None, "dtype float64"),
            (3, None, "last axis counts replicas"),
            ([[]], None, "last axis counts replicas"),
        ],
    )
    def test_refused(self, grid, devices, what):
        with pytest.raises(ShardingError, match=what):
            Tiles(grid, devices)

    def test_the_grid_is_kept_as_it_was(self):
        grid = np.arange(4).reshape(2, 2)
        tiles = Tiles(grid)
        grid[:] = 0
        assert tiles.grid.tolist() == [[0, 1], [2, 3]]
        with pytest.raises(ValueError, match="read-only"):
            tiles.grid[0, 0] = 1
        with pytest.raises(AttributeError, match="immutable"):
            tiles.grid = grid

    def test_repr_is_the_constructor(self):
        for tiles in (Tiles([[0, 1], [2, 3]]), Tiles([[2]], 8)):
            assert eval(repr(tiles), {"Tiles": Tiles}) == tiles


class TestEquality:
    def test_the_order_of_replicas_does_not_matter(self):
        assert Tiles([[0, 1], [2, 3]]) == Tiles([[1, 0], [3, 2]])
        assert len({Tiles([[0, 1], [2, 3]]), Tiles([[1, 0], [3, 2]])}) == 1

    def test_different(self):
        for other in ([[0], [1], [2], [3]], [[2, 3], [0, 1]], [[0, 1]]):
            assert Tiles([[0, 1], [2, 3]]) != Tiles(other)
        assert Tiles([[0, 1], [2, 3]]) != "tiles"
        assert Tiles([[0]], num_devices=8) != Tiles([[0]])


class TestShardings:
    def test_one_device(self):
        assert Tiles.from_sharding(SingleDeviceSharding(jax.devices()[5]), 2) == Tiles([[[0]]])

    def test_numbers_are_positions_in_the_mesh(self):
        turned = make_mesh((4, 2), ("x", "y"), devices=jax.devices()[::-1])
        tiles = Tiles.from_sharding(NamedSharding(turned, P("x")), 1)
        assert tiles.grid.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]

    def test_a_kind_without_a_mesh(self):
        with pytest.raises(
            UnrepresentableError, match=r"a GSPMDSharding has no mesh.*iso\.reshard"
        ):
            Tiles.from_sharding(type("GSPMDSharding", (), {})(), 1)


class TestToSpec:
    @pytest.mark.parametrize(
        "tiles",
        [
            Tiles([[0], [3], [1], [2], [4], [5], [6], [7]]),  # no order of axes
            Tiles([[[0], [1]], [[3], [2]], [[4], [5]], [[6], [7]]]),  # one pair turned
            Tiles([[i] for i in range(6)]),  # another number of devices
            Tiles([[3]], num_devices=8),  # seven hold nothing
            Tiles(np.array([0, 3, 5, 6, 1, 2, 4, 7]).reshape(2, 4)),  # replicas of no axis
        ],
        ids=repr,
    )
    def test_what_a_spec_cannot_say(self, mesh, tiles):
        with pytest.raises(UnrepresentableError, match=r"follow no order .* 'x' \(2\), 'y' \(4\)"):
            tiles.to_spec(mesh)


class TestSlices:
    def test_uneven(self):
        with pytest.raises(ShardingError, match=r"\(3,\) does not split into \(2,\)"):
            Tiles([[0], [1]]).slices((3,))
