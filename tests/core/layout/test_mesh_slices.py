"""Which devices are in one slice, and which axes go from slice to slice."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from isoshard import ShardingError, hybrid_mesh, make_mesh
from isoshard.core.layout.mesh_slices import slice_ids, slices_over
from isoshard.errors import DeviceError
from isoshard.planner.machine.topologies import topology
from isoshard.sharding import slice_axes


def test_virtual_devices_are_grouped_as_hybrid_mesh_groups_them():
    mesh = hybrid_mesh((4, 1), (1, 2), ("model", "replica"))
    assert slice_ids(mesh, 2).tolist() == [[0, 1]] * 4
    assert slice_axes(mesh, 2) == {"replica": 2}
    assert slice_axes(mesh) == {}


def test_one_grid_may_stand_for_different_slices():
    two, four = hybrid_mesh((1, 4), (2, 1), ("a", "b")), hybrid_mesh((1, 2), (2, 2), ("a", "b"))
    assert two == four
    assert slice_axes(two, 2) == {"a": 2}
    assert slice_axes(four, 4) == {"a": 2, "b": 2}


def test_described_slices_are_known():
    mesh = topology("v5e:32*16x16").mesh((32, 256), ("replica", "data"))
    assert slice_axes(mesh) == {"replica": 32}
    assert slices_over(mesh, ("data",)) == 1
    assert slices_over(mesh, ()) == 1
    wide = topology("v5e:2*4x4").mesh((32,), ("data",))
    assert slice_axes(wide) == {"data": 2}


def device(number, **more):
    return types.SimpleNamespace(id=number, **more)


@pytest.mark.parametrize(
    ("platform", "more", "crossing"),
    [
        ("tpu", {}, 1),  # one slice of several hosts
        ("cpu", {}, 2),
        ("gpu", {}, 2),
        ("gpu", {"slice_index": 0}, 1),
    ],
)
def test_of_several_processes_hosts_are_slices_unless_devices_know_better(
    monkeypatch, platform, more, crossing
):
    devices = [device(n, platform=platform, process_index=n // 4, **more) for n in range(8)]
    mesh = types.SimpleNamespace(devices=np.array(devices, object), axis_names=("x",))
    assert slices_over(mesh, ("x",)) == crossing


def test_slices_that_do_not_fit():
    mesh = make_mesh((8,), ("x",))
    with pytest.raises(ShardingError, match=r"slices=3 does not divide the 8 devices"):
        slice_axes(mesh, 3)
    with pytest.raises(ShardingError, match=r"are in 2 slices, not slices=4"):
        slice_axes(topology("v5e:2*2x4").mesh((16,), ("x",)), 4)


def test_a_hybrid_mesh_of_other_slices_than_the_devices_know(monkeypatch):
    devices = [device(n, platform="tpu", process_index=0, slice_index=n // 2) for n in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(DeviceError, match=r"in 4 slices, and dcn \(2, 1\) arranges 2.*product 4"):
        hybrid_mesh((1, 4), (2, 1), ("a", "b"))


def test_a_mesh_of_any_order_is_read_by_ids():
    turned = Mesh(np.array(jax.devices()[::-1], object), ("x",))
    assert slice_ids(turned, 2).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
