"""Every spec over meshes of up to 8 devices, ranks 1 to 3: written, read, and as JAX has it."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import make_mesh
from isoshard.core.layout.spec import same_layout
from isoshard.core.layout.tiles import Tiles
from isoshard.onnx_bridge import AnnotationError, from_sharding_spec, to_sharding_spec
from isoshard.onnx_bridge.layouts.tiling import read_tiles
from isoshard.onnx_bridge.layouts.writing import write_tiles

MESHES = [(1,), (5,), (8,), (1, 8), (2, 4), (4, 2), (3, 2), (2, 2, 2), (1, 2, 4)]


def specs(names, rank):
    """Each assignment of mesh axes to tensor axes or none, in every order on one tensor axis."""
    for homes in itertools.product(range(-1, rank), repeat=len(names)):
        groups = [
            [n for n, home in zip(names, homes, strict=True) if home == d] for d in range(rank)
        ]
        for entries in itertools.product(*(itertools.permutations(group) for group in groups)):
            yield P(*(entry or None for entry in entries))


def devices_of(proto, shape):
    """The block that each device holds, straight from the message."""
    return read_tiles(proto, shape).slices(shape)


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_every_spec_goes_and_comes_back(shape):
    names = ("x", "y", "z")[: len(shape)]
    mesh = make_mesh(shape, names)
    position = {device: at for at, device in enumerate(mesh.devices.flat)}
    cases = 0
    for rank in (1, 2, 3) if len(shape) < 3 else (1, 2):
        for spec in specs(names, rank):
            sharding = NamedSharding(mesh, spec)
            sizes = (840,) * rank  # a multiple of 1 to 8
            proto = to_sharding_spec(sharding, "t", sizes)
            theirs = {
                position[device]: tuple(
                    slice(*part.indices(size)[:2]) for part, size in zip(index, sizes, strict=True)
                )
                for device, index in sharding.devices_indices_map(sizes).items()
            }
            assert devices_of(proto, sizes) == theirs
            back = from_sharding_spec(proto, sizes, mesh)
            assert same_layout(back, sharding, rank)
            assert to_sharding_spec(back, "t", sizes) == proto
            made = from_sharding_spec(proto, sizes)
            assert to_sharding_spec(made, "t", sizes) == proto
            cases += 1
    assert cases >= 9 if len(shape) == 1 else cases > 20


@settings(max_examples=12, deadline=None)
@given(order=st.permutations(range(8)), blocks=st.sampled_from([(8,), (4, 2), (2, 2), (2,), (4,)]))
def test_any_order_of_devices_is_kept_or_refused(order, blocks):
    """A mesh is made for any layout; over a fixed mesh the layout is the same, or an error."""
    tiles = Tiles(np.array(order).reshape(*blocks, -1))
    proto = write_tiles(tiles, "t")
    shape = (8,) * tiles.ndim
    assert read_tiles(proto, shape, 8) == tiles
    made = from_sharding_spec(proto, shape).devices_indices_map(shape)
    assert {jax.devices().index(device): index for device, index in made.items()} == {
        device: tuple(slice(None) if part == slice(0, 8) else part for part in index)
        for device, index in tiles.slices(shape).items()
    }
    mesh = make_mesh((2, 2, 2), ("x", "y", "z"))
    try:
        found = from_sharding_spec(proto, shape, mesh)
    except AnnotationError as error:
        assert error.tensor == "t"
    else:
        assert Tiles.from_sharding(found, tiles.ndim) == tiles
