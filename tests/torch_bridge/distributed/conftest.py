"""The meshes of most tests here."""

import pytest

from isoshard.torch_bridge.distributed import init_device_mesh


@pytest.fixture
def mesh():
    return init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))


@pytest.fixture
def line():
    return init_device_mesh("jax", (4,))
