"""Meshes in torch_xla's words: shapes, strings, slices, and what is no mesh."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest
import torch

from isoshard import DeviceError, ShardingError, SpecError, make_mesh
from isoshard.torch_bridge.spmd import OpSharding
from isoshard.torch_bridge.spmd import hybrid as hybrid_module
from isoshard.torch_bridge.spmd.mesh import mesh_from
from isoshard.torch_bridge.torch_xla.distributed import spmd as xs


def test_a_mesh_tells_its_parts():
    mesh = xs.Mesh(np.arange(8), (2, 4), ("x", "y"))
    assert mesh.size() == 8 and list(mesh.shape().items()) == [("x", 2), ("y", 4)]
    np.testing.assert_array_equal(mesh.get_logical_mesh(), np.arange(8).reshape(2, 4))
    assert [mesh.get_axis_name_idx(name) for name in ("x", "y", "z")] == [0, 1, None]
    assert (mesh.mesh_shape, mesh.axis_names) == ((2, 4), ("x", "y"))
    plain = xs.Mesh(list(range(8)), [8])
    assert list(plain.shape().items()) == [(0, 8)] and plain.get_axis_name_idx("x") is None
    assert plain.get_jax_mesh().axis_names == ("0",)


@pytest.mark.parametrize("ids", [[3, 1, 2, 0], np.array([3, 1, 2, 0]), torch.tensor([3, 1, 2, 0])])
def test_a_mesh_may_be_a_part_of_the_devices_in_any_order(ids):
    mesh = xs.Mesh(ids, (2, 2), ("x", "y"))
    devices = jax.devices()
    assert mesh.get_jax_mesh().devices.tolist() == [
        [devices[3], devices[1]],
        [devices[2], devices[0]],
    ]
    t = xs.mark_sharding(torch.arange(4.0).to("jax"), mesh, (("x", "y"),))
    assert t.sharding_spec == "{devices=[4]3,1,2,0}"
    assert [s.shard_device for s in t.local_shards] == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    assert [s.data.item() for s in t.local_shards] == [3, 1, 2, 0]
    assert (t * 2).tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    "mesh",
    [
        xs.Mesh(range(8), (2, 4), ("x", "y")),
        xs.Mesh([5, 2], (1, 2)),
        xs.Mesh(np.arange(8)[::-1], (2, 2, 2)),
    ],
    ids=str,
)
def test_a_mesh_survives_its_string(mesh):
    again = xs.Mesh.from_str(str(mesh))
    assert again is not None and str(again) == str(mesh)
    assert again.get_jax_mesh() == mesh.get_jax_mesh()
    assert repr(again) == repr(mesh) and repr(mesh).startswith("Mesh([")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[1, 2]",
        "{'device_ids': [0]}",
        "{'device_ids': [0], 'mesh_shape': (1,)",
        "7",
    ],
)
def test_what_is_no_mesh_reads_as_none(text):
    assert xs.Mesh.from_str(text) is None


def test_a_string_of_an_impossible_mesh_says_why():
    text = "{'device_ids': [0, 1], 'mesh_shape': (3,), 'axis_names': None}"
    with pytest.raises(ShardingError, match=r"device IDs \(2\) must match mesh size \(3\)"):
        xs.Mesh.from_str(text)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            (range(8), (2, 3)),
            ShardingError,
            r"device IDs \(8\) must match mesh size \(6\)",
        ),
        (([0, 0], (2,)), ShardingError, "Device IDs must be unique"),
        (
            (range(8), (2, 4), ("x",)),
            ShardingError,
            r"names \(1\) must match mesh dimensions",
        ),
        ((range(8), (2, 4), ("x", "x")), ShardingError, "Axis names must be unique"),
        (([0, 8], (2,)), DeviceError, r"needs 9 devices, there are 8 \(cpu\)"),
        (([0, -1], (2,)), DeviceError, r"addressable_devices; got: \[0, -1\]"),
    ],
)
def test_no_mesh(given, error, message):
    with pytest.raises(error, match=message):
        xs.Mesh(*given)


def test_op_shardings_are_made_once():
    mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    found = mesh.get_op_sharding(("x", None))
    assert isinstance(found, OpSharding) and found is mesh.get_op_sharding(("x", None))
    assert found.sharding_type == xs.ShardingType.PARTIAL
    assert found.replication_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found.group_assignment == ((0,), (1,))
    assert str(mesh.get_op_sharding((0, 1))) == "{devices=[2,4]0,1,2,3,4,5,6,7}"
    assert mesh.get_op_sharding((0, 1)) == OpSharding(
        [[0, 1, 2, 3], [4, 5, 6, 7]], [], [], xs.ShardingType.TILED
    )
    assert str(mesh.get_op_sharding(())) == str(mesh.get_op_sharding((None,))) == "{replicated}"
    assert str(OpSharding([], [], [], 4)) == "{manual}"
    with pytest.raises(SpecError, match="no mesh axis is called 'q'"):
        mesh.get_op_sharding(("q",))
    with pytest.raises(SpecError, match="no axis name, index"):
        mesh.get_op_sharding((False, 1))


def test_the_global_mesh_is_the_one_set():
    assert xs.get_global_mesh() is None
    mesh = xs.get_1d_mesh("data")
    xs.set_global_mesh(mesh)
    assert xs.get_global_mesh() is mesh
    assert (mesh.mesh_shape, mesh.axis_names) == ((8,), ("data",))
    assert xs.get_1d_mesh().axis_names is None


def test_meshes_of_others_are_taken():
    from torch.distributed.device_mesh import DeviceMesh

    want = xs.Mesh(range(8), (2, 4), ("x", "y"))
    assert mesh_from(want) is want
    assert repr(mesh_from(make_mesh((2, 4), ("x", "y")))) == repr(want)
    ranks = torch.arange(8).reshape(2, 4)
    assert repr(mesh_from(DeviceMesh("xla", ranks, mesh_dim_names=("x", "y")))) == repr(want)
    with pytest.raises(TypeError, match=r"a mesh is a jax.sharding.Mesh.*given was str"):
        mesh_from("x")


# --- Slices --------------------------------------------------------------------------------------


def test_a_hybrid_mesh_of_one_slice_is_a_mesh():
    mesh = xs.HybridMesh(ici_mesh_shape=(2, 4), axis_names=("data", "model"))
    np.testing.assert_array_equal(mesh.get_logical_mesh(), np.arange(8).reshape(2, 4))
    assert mesh.dcn_mesh_shape == (1, 1) and isinstance(mesh, xs.Mesh)
    assert list(mesh.shape().items()) == [("data", 2), ("model", 4)]


def test_virtual_slices_come_first_along_each_axis():
    mesh = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1))
    np.testing.assert_array_equal(mesh.get_logical_mesh(), [[0, 1], [2, 3], [4, 5], [6, 7]])
    mesh = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(1, 2), axis_names=("x", "y"))
    np.testing.assert_array_equal(mesh.get_logical_mesh(), [[0, 1, 4, 5], [2, 3, 6, 7]])
    t = xs.mark_sharding(torch.ones(4, 4).to("jax"), mesh, ("x", "y"))
    assert t.sharding_spec == "{devices=[2,4]0,1,4,5,2,3,6,7}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ici_mesh_shape": (2, 2)}, r"1 slices of 4 devices.*are 4 devices, there are 8"),
        ({"ici_mesh_shape": (2, 4), "dcn_mesh_shape": (2, 1)}, "are 16 devices, there are 8"),
        ({"ici_mesh_shape": (8,), "dcn_mesh_shape": (1, 1)}, "dcn has 2 entries for 1 names"),
        ({"ici_mesh_shape": (2, 4), "axis_names": ("x",)}, "ici has 2 entries for 1 names"),
    ],
)
def test_no_hybrid_mesh(given, message):
    with pytest.raises(ValueError, match=message):
        xs.HybridMesh(**given)


def test_slices_that_devices_tell_of_must_be_arranged(monkeypatch):
    devices = [types.SimpleNamespace(slice_index=n // 4) for n in range(8)]
    monkeypatch.setattr(hybrid_module.jax, "devices", lambda: devices)
    with pytest.raises(ValueError, match=r"in 2 slices, and dcn_mesh_shape \(1, 1\) arranges 1"):
        xs.HybridMesh(ici_mesh_shape=(2, 4))
