"""Arrays as DTensors where one process is the only rank."""

import jax
import numpy as np
import pytest
import torch
import torch.distributed as dist
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import isoshard as iso
from isoshard.core.errors import DeviceError, UnrepresentableError


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def on_device(number):
    mesh = Mesh(np.array(jax.devices()[number : number + 1]), ("x",))
    return iso.shard(np.arange(6.0, dtype=np.float32).reshape(3, 2), mesh, ("x",))


@pytest.mark.usefixtures("group")
def test_without_a_mesh_it_is_on_that_of_the_only_rank():
    array = on_device(0)
    found = iso.to_dtensor(array)
    assert found.device_mesh.device_type == array.sharding.mesh.devices.flat[0].platform
    assert found.device_mesh.mesh_dim_names == ("x",) and found.placements == (Shard(0),)
    assert torch.equal(found.to_local(), torch.arange(6.0).reshape(3, 2))
    for wanted in (None, NamedSharding(array.sharding.mesh, P(None, "x"))):
        back = iso.to_jax(found, wanted)
        assert back.sharding == (wanted or array.sharding) and (back == array).all()


@pytest.mark.usefixtures("group")
def test_another_device_is_no_rank():
    with pytest.raises(DeviceError, match=r"is on .*3.*the only rank .* iso.shard\(x, mesh"):
        iso.to_dtensor(on_device(3))


@pytest.mark.usefixtures("group")
def test_a_mesh_without_ranks_is_refused():
    mesh = DeviceMesh("xla", torch.tensor([0]), mesh_dim_names=("x",))
    with pytest.raises(UnrepresentableError, match=r"no ranks .*init_device_mesh\('cpu', ..\)"):
        iso.to_dtensor(on_device(0), mesh)


def test_without_a_process_group_it_is_asked_for():
    with pytest.raises(
        DeviceError, match=r"needs torch's process group.*iso.distributed.init_distributed"
    ):
        iso.to_dtensor(on_device(0))


@pytest.mark.usefixtures("group")
def test_ranks_that_jax_does_not_know(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(DeviceError, match=r"has 2 ranks, and JAX has one process"):
        iso.to_dtensor(on_device(0))
