"""Placements that no sharding says, and meshes in both languages."""

import math

import jax
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from isoshard import make_mesh
from isoshard.core.errors import DeviceError, ShardingError
from isoshard.errors import SpecError, UnrepresentableError
from isoshard.torch_bridge.placements import meshes
from isoshard.torch_bridge.placements.translation import (
    check_count,
    device_mesh_of,
    jax_mesh,
    layout_of,
    placements_of,
    placements_on,
    spec_of,
)
from tests.torch_bridge.dtensor.layouts import MESHES, torch_mesh


@pytest.mark.parametrize(
    ("placements", "error", "message"),
    [
        ((Shard(0),), ValueError, "1 placements for a mesh of 2 axes"),
        ((Shard(0),) * 3, ValueError, "3 placements for a mesh of 2 axes"),
        ((Shard(2), Replicate()), IndexError, "mesh axis 0 .*a tensor of rank 2 has no axis 2"),
        ((Replicate(), Shard(-3)), IndexError, "mesh axis 1 .*has no axis -3"),
        (
            ((Shard(0), Shard(1)), Replicate()),
            SpecError,
            r"mesh axis 0 has 2 placements.*it splits one tensor axis, or has terms of a sum",
        ),
        ((Replicate(), (Shard(0), Partial())), SpecError, "mesh axis 1 has 2 placements"),
        (("dp", Replicate()), SpecError, "'dp' is no placement"),
        (
            (_StridedShard(0, split_factor=3), Shard(0)),
            UnrepresentableError,
            r"mesh axis 0 .*sf=3.*splits each of 3 parts.*make 1 or 2, so this is no order",
        ),
        (
            (Replicate(), _StridedShard(1, split_factor=2)),
            UnrepresentableError,
            r"mesh axis 1 .*2 parts of tensor axis 1.*make 1, so.*View that tensor axis as \(2, -1",
        ),
    ],
)
def test_refused_placements(placements, error, message):
    with pytest.raises(error, match=message):
        layout_of(placements, torch_mesh((2, 2)), (12, 12))
    with pytest.raises(error, match=message):
        check_count(placements, jax_mesh(torch_mesh((2, 2))))
        spec_of(placements, 2, (2, 2))


def test_spec_of_refuses_sums_and_factors_without_sizes():
    with pytest.raises(NotImplementedError, match=r"mesh axis 1 .*sums over devices are reduced"):
        spec_of((Shard(0), Partial()), 2)
    with pytest.raises(ShardingError, match=r"split factors.*pass spec_of\(placements, ndim, mesh"):
        spec_of((_StridedShard(0, split_factor=2), Shard(0)), 2)


def test_one_mesh_axis_twice_is_no_sharding_either():
    explicit = Mesh(np.array(jax.devices()), ("x",), (AxisType.Explicit,))
    with pytest.raises(Exception, match="at most one positional dimension"):  # JAX's own class
        NamedSharding(explicit, P("x", "x"))
    with pytest.raises(ValueError, match="cannot overlap with unreduced"):
        NamedSharding(explicit, P("x", unreduced={"x"}))
    with pytest.raises(UnrepresentableError, match="leaves tensor axis 0 open"):
        auto = make_mesh((8,), ("x",), axis_types=AxisType.Auto)  # which alone can be left open
        placements_of(NamedSharding(auto, P(P.UNCONSTRAINED)))


def test_a_sharding_of_one_device_has_no_placements():
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for call in (placements_of, lambda sharding: placements_on(sharding, torch_mesh((1,)), 1)):
        with pytest.raises(UnrepresentableError, match="a SingleDeviceSharding names no mesh axes"):
            call(alone)


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
def test_meshes_round_trip(shape):
    given = torch_mesh(shape, ranks=range(math.prod(shape) - 1, -1, -1))
    mesh = jax_mesh(given)
    assert mesh.axis_names == given.mesh_dim_names and mesh.axis_sizes == shape
    assert [d.id for d in mesh.devices.flat] == given.mesh.ravel().tolist()
    assert mesh.are_all_axes_auto
    back = device_mesh_of(mesh)
    assert back.mesh.tolist() == given.mesh.tolist() and back.mesh_dim_names == mesh.axis_names
    assert jax_mesh(back) == mesh and device_mesh_of(mesh) is back


def test_unnamed_axes_and_parts_of_a_mesh():
    plain = DeviceMesh("xla", torch.tensor([[6, 4], [2, 0]]))
    mesh = jax_mesh(plain)
    assert mesh.axis_names == ("0", "1") and [d.id for d in mesh.devices.flat] == [6, 4, 2, 0]
    assert device_mesh_of(mesh) is plain
    fresh = device_mesh_of(Mesh(np.array(jax.devices()[2:4]), ("0",)))
    assert fresh.mesh_dim_names is None and fresh.mesh.tolist() == [2, 3]
    explicit = jax.make_mesh((2, 2), ("x", "y"))  # the types of axes are JAX's own affair
    assert device_mesh_of(explicit) is device_mesh_of(make_mesh((2, 2), ("x", "y")))
    typed = torch_mesh((4, 2), names=("u", "v"))
    assert device_mesh_of(jax_mesh(typed)) is device_mesh_of(jax_mesh(typed), "cpu") is typed
    assert jax_mesh(make_mesh((2, 4), ("x", "y"))).axis_names == ("x", "y")


def test_too_few_devices():
    with pytest.raises(DeviceError, match=r"ranks \[8, 9\].*8 devices.*init_distributed\(\) first"):
        jax_mesh(torch_mesh((10,)))


class FakeDevice:
    def __init__(self, process_index):
        self.process_index = process_index


def test_a_rank_is_the_one_device_of_its_process(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    devices = [FakeDevice(index) for index in (2, 0, 1)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert [device.process_index for device in meshes._devices_by_rank()] == [0, 1, 2]
    devices.append(FakeDevice(1))
    with pytest.raises(DeviceError, match=r"processes \[1\] have several JAX devices"):
        meshes._devices_by_rank()


def test_a_mesh_of_several_processes_needs_their_group(monkeypatch):
    mesh = make_mesh((3,), ("nobody_has_seen",))
    monkeypatch.setattr(jax, "process_count", lambda: 8)
    devices = jax.devices()
    monkeypatch.setattr(meshes, "_devices_by_rank", lambda: devices)
    with pytest.raises(
        DeviceError, match=r"needs torch's process group.*iso.distributed.init_distributed"
    ):
        device_mesh_of(mesh)
