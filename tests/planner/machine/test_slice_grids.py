"""Meshes over machines: devices in the order that JAX would choose, over slices and parts."""

from __future__ import annotations

import numpy as np
import pytest
from jax.experimental import mesh_utils

from isoshard.core.errors import ShardingError
from isoshard.planner.machine.topologies import topology, topology_of


def numbers(mesh):
    return np.vectorize(lambda device: device.id)(mesh.devices)


@pytest.mark.parametrize(
    ("text", "shape"),
    [("v5e:16x16", (64, 4)), ("v5e:4x4", (16,)), ("v5p:4x4x8", (8, 16)), ("v4:4x4x4", (2, 2, 16))],
)
def test_a_torus_is_arranged_as_mesh_utils_does_it(text, shape):
    machine = topology(text)
    names = tuple("abc"[: len(shape)])
    mesh = machine.mesh(shape, names)
    theirs = mesh_utils.create_device_mesh(shape, machine.devices, allow_split_physical_axes=True)
    assert mesh.devices.tolist() == theirs.tolist()
    assert machine.mesh(shape, names) == mesh and topology_of(mesh) is machine


def test_the_last_axes_stay_inside_a_host_of_gpus():
    mesh = topology("h100:4x8").mesh((2, 4, 4), ("a", "b", "c"))
    assert (numbers(mesh) == np.arange(32).reshape(2, 4, 4)).all()
    hosts = np.vectorize(lambda device: device.process_index)(mesh.devices)
    assert (hosts == hosts[..., :1]).all()


def slices_of(mesh):
    return np.vectorize(lambda device: device.slice_index)(mesh.devices)


def test_slices_lie_along_the_first_axis_that_can_take_them():
    machine = topology("v5e:4*4x4")
    found = slices_of(machine.mesh((4, 16), ("replica", "model")))
    assert (found == np.arange(4)[:, None]).all()
    found = slices_of(machine.mesh((8, 8), ("data", "model")))
    assert (found == np.repeat(np.arange(4), 2)[:, None]).all()
    found = slices_of(machine.mesh((1, 2, 32), ("a", "b", "c")))
    assert found[0, 0, 0] == 0 and found[0, 0, 16] == 1 and found[0, 1, 0] == 2


def test_slices_lie_where_they_are_told():
    machine = topology("v5e:4*4x4")
    found = slices_of(machine.mesh((8, 8), ("a", "b"), slices={"a": 2, "b": 2}))
    assert (found == np.kron([[0, 1], [2, 3]], np.ones((4, 4)))).all()
    found = slices_of(machine.mesh((8, 8), ("a", "b"), slices={"b": 4}))
    assert (found == np.repeat(np.arange(4), 2)).all()


def test_a_smaller_mesh_takes_a_block_of_the_grid():
    mesh = topology("v5e:16x16").mesh((4, 4), ("a", "b"))
    assert {device.coords for device in mesh.devices.flat} == {
        (x, y, 0) for x in range(4) for y in range(4)
    }
    mesh = topology("v5e:16x16").mesh((2, 16), ("a", "b"))
    assert max(device.coords for device in mesh.devices.flat) == (3, 7, 0)
    mesh = topology("v5e:4*4x4").mesh((2, 16), ("a", "b"))
    assert set(slices_of(mesh).flat) == {0, 1}


@pytest.mark.parametrize(
    ("text", "shape", "slices", "message"),
    [
        ("v5e:4x4", (4, 8), None, r"shape \(4, 8\) has 32 devices, and v5e:4x4 has 16"),
        ("v5e:4x4", (16, 1, 1), None, r"has 3 axes, and axis_names has 2: a, b"),
        ("v5e:4x4", (7, 2), None, r"no block of v5e:4x4 has 14 devices: .*at most 4 x 4"),
        ("v5e:2*4x4", (4, 5), None, r"does not fill slices: one of .* has 16 devices"),
        ("v5e:2*4x4", (3, 8), {"a": 2}, r"cannot span slices as a 2:"),
        ("v5e:2*4x4", (2, 16), {"z": 2}, r"slices= has z, and the axes are a, b"),
        ("h100:2x8", (2, 8), {"a": 2}, r"h100:2x8 has no slices for axes a:"),
    ],
)
def test_what_does_not_fit_is_told(text, shape, slices, message):
    with pytest.raises(ShardingError, match=message):
        topology(text).mesh(shape, ("a", "b"), slices=slices)
