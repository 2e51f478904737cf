"""Meshes, DTensor's verbs, automatic layouts, and pictures."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from isoshard import P, ShardingError, make_mesh
from isoshard.errors import DeviceError, SpecError
from isoshard.torch_bridge.spmd import OpSharding
from isoshard.torch_bridge.spmd import hybrid as hybrid_module
from isoshard.torch_bridge.spmd.auto import auto_mesh, auto_spec
from isoshard.torch_bridge.spmd.mesh import mesh_from
from isoshard.torch_xla_bridge.torch_xla import runtime
from isoshard.torch_xla_bridge.torch_xla.distributed import spmd as xs
from isoshard.torch_xla_bridge.torch_xla.distributed.spmd import api, debugging


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# --- Meshes and placements -----------------------------------------------------------------------


def test_a_device_mesh_becomes_a_mesh():
    ranks = torch.arange(8).flip(0).reshape(2, 4)
    for names in (None, ("a", "b")):
        mesh = api.convert_to_xla_mesh(DeviceMesh("xla", ranks, mesh_dim_names=names))
        assert mesh.device_ids.tolist() == ranks.flatten().tolist()
        assert (mesh.mesh_shape, mesh.axis_names) == ((2, 4), names)
    assert api.convert_to_xla_mesh(init_device_mesh("xla", (8,))).mesh_shape == (8,)
    assert api.convert_to_xla_mesh(DeviceMesh("xla", list(range(4)))).size() == 4


def test_placements_become_a_spec():
    for placements, spec in (
        ([Replicate(), Shard(0)], (1, None)),
        ([Shard(1), Shard(0)], (1, 0)),
        ([Shard(0), Shard(0)], ((0, 1), None)),
        ([Shard(-1), Replicate()], (None, 0)),
        ([Replicate(), Replicate()], (None, None)),
    ):
        assert api.convert_to_xla_partition_spec(data(8, 8), placements) == spec
    with pytest.raises(NotImplementedError, match="Partial"):
        api.convert_to_xla_partition_spec(data(8, 8), [Partial(), Shard(0)])


MESHES = {
    "DeviceMesh": lambda: DeviceMesh("xla", torch.arange(8).reshape(2, 4)),
    "xs.Mesh": lambda: xs.Mesh(range(8), (2, 4)),
    "jax": lambda: make_mesh((2, 4), ("x", "y")),
}


@pytest.mark.parametrize(
    ("kind", "where"), [("DeviceMesh", "jax"), ("xs.Mesh", "cpu"), ("jax", "jax")]
)
def test_a_tensor_is_distributed(kind, where):
    t = data(16, 8).to(where)
    found = xs.xla_distribute_tensor(t, MESHES[kind](), [Shard(0), Shard(0)])
    assert found.sharding_spec == "{devices=[8,1]0,1,2,3,4,5,6,7}"
    assert found.placements == (Shard(0), Shard(0))
    assert [s.data.tolist() for s in found.local_shards] == [
        part.tolist() for part in data(16, 8).split(2)
    ]
    assert (found is t) == (where == "jax")
    whole = xs.xla_distribute_tensor(data(3), MESHES[kind]())
    assert whole.sharding_spec == "{replicated}"


def test_leaves_and_parameters_stay_such():
    mesh, rows = MESHES["xs.Mesh"](), [Shard(0), Replicate()]
    for requires_grad in (True, False):
        source = data(8).requires_grad_(requires_grad)
        found = xs.xla_distribute_tensor(source, mesh, rows)
        assert found.is_leaf and found.requires_grad is requires_grad and found is not source
        computed = xs.xla_distribute_tensor(source * 2, mesh, rows)
        assert computed.is_leaf is not requires_grad
        if requires_grad:
            (found + computed).sum().backward()
            assert found.grad.tolist() == [1.0] * 8 and source.grad.tolist() == [2.0] * 8
    weight = nn.Linear(8, 8).to("jax").weight
    found = xs.xla_distribute_tensor(weight, mesh, rows)
    assert found is weight and found.is_leaf and found.requires_grad


def test_what_is_not_distributed():
    mesh = MESHES["DeviceMesh"]()
    with pytest.raises(ValueError, match="1 placements for a mesh of 2 axes"):
        xs.xla_distribute_tensor(data(8), mesh, [Shard(0)])
    with pytest.raises(ShardingError, match=r"of device type 'xla' or 'jax'.*'cuda'"):
        xs.xla_distribute_tensor(data(8), DeviceMesh("cuda", [0], _init_backend=False, _rank=0))
    t = xs.xla_distribute_tensor(data(8, 8), mesh, [Shard(0), Replicate()])
    with pytest.raises(ShardingError, match=r"marked .* already"):
        xs.xla_distribute_tensor(t, mesh, [Shard(1), Replicate()])
    with pytest.raises(ShardingError, match=r"one process's shard.*full_tensor\(\)"):
        xs.xla_distribute_tensor(data(8).as_subclass(DTensor), mesh)


class DTensor(torch.Tensor):
    """Called as torch's class, without a process group."""


# --- Modules -------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))


def test_a_module_is_partitioned_by_a_function():
    mesh, names = DeviceMesh("xla", list(range(8))), []

    def partition(name, module, given):
        names.append(name)
        assert given is mesh
        if isinstance(module, nn.Linear) and name == "0":
            xs.xla_distribute_tensor(module.weight, given, [Shard(0)])

    model = net().to("jax")
    assert xs.xla_distribute_module(model, mesh, partition) is model
    assert names == ["", "0", "1", "2"]
    assert model[0].weight.partition_spec == P("0") and model[2].weight.partition_spec is None


def test_inputs_and_outputs_are_distributed():
    mesh = xs.Mesh(range(8), (8,), ("data",))
    model = xs.xla_distribute_module(
        net().to("jax"),
        mesh,
        input_fn=lambda module, inputs, mesh: (xs.mark_sharding(inputs[0], mesh, ("data", None)),),
        output_fn=lambda module, outputs, mesh: outputs.cpu(),
    )
    x = data(8, 16).to("jax")
    got = model(x)
    assert got.device.type == "cpu" and x.partition_spec == P("data")
    torch.testing.assert_close(got, net()(data(8, 16)))
    with pytest.warns(FutureWarning, match=r"input_fn with two arguments"):
        model = xs.xla_distribute_module(net(), mesh, input_fn=lambda inputs, mesh: None)
    model(data(8, 16))
    with pytest.raises(ValueError, match=r"output_fn is called with .* takes 1 arguments"):
        xs.xla_distribute_module(net(), mesh, output_fn=lambda outputs: outputs)


def test_the_automatic_policy_lays_parameters_out_by_its_rule():
    mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    for where, bias in (("jax", ("y",)), ("cpu", (("x", "y"),))):
        model = net().to(where)
        xs.mark_sharding(model[0].bias, mesh, ("y",)) if where == "jax" else None
        assert xs.xla_distribute_module(model, mesh, xs.auto_policy) is model
        specs = {name: tuple(p.partition_spec) for name, p in model.named_parameters()}
        assert specs == {
            "0.weight": (("x", "y"),),
            "0.bias": bias,
            "2.weight": (None, ("x", "y")),
            "2.bias": (),
        }
    torch.testing.assert_close(model(data(4, 16).to("jax")).cpu(), net()(data(4, 16)))
    for shape, mesh_shape, spec in (
        ((64, 16), (2, 4), ((0, 1), None)),
        ((16, 16), (2, 4), ((0, 1), None)),  # of two alike the first
        ((100, 16), (2, 4), (None, (0, 1))),
        ((12, 6), (2, 4), (1, None)),
        ((6, 10), (2, 4), (None, 0)),
        ((3, 5), (2, 4), (None, None)),
        ((8,), (1,), (None,)),
        ((), (8,), ()),
        ((0, 3), (8,), (None, None)),
    ):
        assert auto_spec(shape, mesh_shape) == spec


def test_the_automatic_mesh(monkeypatch):
    @api.with_xla
    def function(self, value):
        """Say so."""
        return self, value

    monkeypatch.setenv("XLA_USE_SPMD", "0")  # and what was set comes back after the test
    assert not runtime.is_spmd()
    assert function(1, value=2) == (1, 2) and runtime.is_spmd()
    assert function.__name__ == "function" and function.__doc__ == "Say so."
    assert auto_mesh().mesh_shape == (8,)
    monkeypatch.setenv("XLA_AUTO_SPMD_MESH", "2,4")
    assert auto_mesh().mesh_shape == (2, 4)
    for wrong in ("2,3", "a,b", "-2,-4"):
        monkeypatch.setenv("XLA_AUTO_SPMD_MESH", wrong)
        with pytest.raises(ShardingError, match=r"there are 8 devices.*such as 8 or 2,4"):
            auto_mesh()
    xs.set_global_mesh(xs.get_1d_mesh("data"))
    assert auto_mesh() is xs.get_global_mesh()
    with pytest.raises(ShardingError, match=r"layer.weight is on cpu; move the module"):
        xs.auto_policy("layer", nn.Linear(2, 2))


# --- Pictures ------------------------------------------------------------------------------------


def boxes(text: str) -> list[list[str]]:
    rows = [line.strip("│").split("│") for line in text.splitlines() if "CPU" in line]
    return [[box.strip() for box in row] for row in rows]


def test_a_tensors_layout_is_drawn(capsys):
    mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    for spec, want in (
        (("x", "y"), [["CPU 0", "CPU 1", "CPU 2", "CPU 3"], ["CPU 4", "CPU 5", "CPU 6", "CPU 7"]]),
        (("x", None), [["CPU [0, 1, 2, 3]"], ["CPU [4, 5, 6, 7]"]]),
        ((None, "x"), [["CPU [0, 1, 2, 3]", "CPU [4, 5, 6, 7]"]]),
        ((None, None), [["CPU [0, 1, 2, 3, 4, 5, 6, 7]"]]),
    ):
        t = xs.mark_sharding(data(8, 8).to("jax"), mesh, spec)
        table = debugging.visualize_tensor_sharding(t, use_color=False)
        assert boxes(capsys.readouterr().out) == want
        assert (table.row_count, len(table.columns)) == (len(want), len(want[0]))


def test_a_string_is_drawn(capsys):
    last = "last_tile_dim_replicate}"
    for text, want in (
        ("{devices=[2,2]<=[4]}", [["CPU 0", "CPU 1"], ["CPU 2", "CPU 3"]]),
        ("{devices=[1,2]5,3}", [["CPU 5", "CPU 3"]]),
        (
            "{devices=[2,1,2,2]0,1,2,3,4,5,6,7 " + last,
            [["CPU [0, 1]", "CPU [2, 3]"], ["CPU [4, 5]", "CPU [6, 7]"]],
        ),
        ("{devices=[2,2,2]0,1,2,3,4,5,6,7}", [["CPU 0", "CPU 1"], ["CPU 2", "CPU 3"]]),
        ("", [["CPU [0, 1, 2, 3, 4, 5, 6, 7]"]]),
    ):
        debugging.visualize_sharding(text, use_color=False)
        assert boxes(capsys.readouterr().out)[:2] == want


def test_the_size_and_colours_of_a_picture(capsys, monkeypatch):
    text = "{devices=[1,2]0,1}"

    def drawn(**options):
        debugging.visualize_sharding(text, use_color=False, **options)
        lines = capsys.readouterr().out.splitlines()
        return len(lines), max(map(len, lines))

    assert drawn() == (5, 21)
    assert drawn(min_width=12) == (5, 27)
    assert drawn(scale=2.0) == (11, 21)
    assert drawn(max_width=16)[1] <= 16
    with pytest.raises(ShardingError, match=r"\(3,\) on .* has no layout to draw; mark it"):
        debugging.visualize_tensor_sharding(data(3))
    with pytest.raises(SpecError, match="must be in braces"):
        debugging.visualize_sharding("nonsense")
    monkeypatch.setenv("FORCE_COLOR", "1")  # colours need a terminal that has them
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    debugging.visualize_sharding(text)
    out = capsys.readouterr().out
    assert "\x1b[" in out and "│" not in out


# --- Names ---------------------------------------------------------------------------------------

# torch_xla 2.9.0: the public names of its SPMD modules (its own imports of other modules left out).


# --- Meshes in torch_xla's words -----------------------------------------------------------------


def test_a_mesh_may_be_a_part_of_the_devices_in_any_order():
    devices = jax.devices()
    for ids in ([3, 1, 2, 0], np.array([3, 1, 2, 0]), torch.tensor([3, 1, 2, 0])):
        mesh = xs.Mesh(ids, (2, 2), ("x", "y"))
        assert mesh.get_jax_mesh().devices.ravel().tolist() == [devices[n] for n in (3, 1, 2, 0)]
    t = xs.mark_sharding(torch.arange(4.0).to("jax"), mesh, (("x", "y"),))
    assert t.sharding_spec == "{devices=[4]3,1,2,0}"
    assert [s.shard_device for s in t.local_shards] == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    assert [s.data.item() for s in t.local_shards] == [3, 1, 2, 0]
    assert (t * 2).tolist() == [0, 2, 4, 6]


def test_a_mesh_survives_its_string():
    for mesh in (
        xs.Mesh(range(8), (2, 4), ("x", "y")),
        xs.Mesh([5, 2], (1, 2)),
        xs.Mesh(np.arange(8)[::-1], (2, 2, 2)),
    ):
        again = xs.Mesh.from_str(str(mesh))
        assert again is not None and str(again) == str(mesh)
        assert again.get_jax_mesh() == mesh.get_jax_mesh()
        assert repr(again) == repr(mesh) and repr(mesh).startswith("Mesh([")
    broken = ("", "nonsense", "[1, 2]", "{'device_ids': [0]}", "{'device_ids': [0], ", "7")
    assert all(xs.Mesh.from_str(text) is None for text in broken)
    text = "{'device_ids': [0, 1], 'mesh_shape': (3,), 'axis_names': None}"
    with pytest.raises(ShardingError, match=r"device IDs \(2\) must match mesh size \(3\)"):
        xs.Mesh.from_str(text)


def test_no_mesh():
    for given, error, message in (
        ((range(8), (2, 3)), ShardingError, r"device IDs \(8\) must match mesh size \(6\)"),
        (([0, 0], (2,)), ShardingError, "Device IDs must be unique"),
        ((range(8), (2, 4), ("x",)), ShardingError, r"names \(1\) must match mesh dimensions"),
        ((range(8), (2, 4), ("x", "x")), ShardingError, "Axis names must be unique"),
        (([0, 8], (2,)), DeviceError, r"needs 9 devices, there are 8 \(cpu\)"),
        (([0, -1], (2,)), DeviceError, r"addressable_devices; got: \[0, -1\]"),
    ):
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
    mesh = xs.Mesh(np.arange(8), (2, 4), ("x", "y"))
    assert mesh.size() == 8 and list(mesh.shape().items()) == [("x", 2), ("y", 4)]
    np.testing.assert_array_equal(mesh.get_logical_mesh(), np.arange(8).reshape(2, 4))
    assert [mesh.get_axis_name_idx(name) for name in ("x", "y", "z")] == [0, 1, None]
    plain = xs.Mesh(list(range(8)), [8])
    assert list(plain.shape().items()) == [(0, 8)] and plain.get_axis_name_idx("x") is None
    assert plain.get_jax_mesh().axis_names == ("0",)


def test_meshes_of_others_are_taken():
    from torch.distributed.device_mesh import DeviceMesh

    want = xs.Mesh(range(8), (2, 4), ("x", "y"))
    assert mesh_from(want) is want
    assert repr(mesh_from(make_mesh((2, 4), ("x", "y")))) == repr(want)
    ranks = torch.arange(8).reshape(2, 4)
    assert repr(mesh_from(DeviceMesh("xla", ranks, mesh_dim_names=("x", "y")))) == repr(want)
    with pytest.raises(TypeError, match=r"a mesh is a jax.sharding.Mesh.*not a str"):
        mesh_from("x")


# --- Slices --------------------------------------------------------------------------------------


def test_a_hybrid_mesh_is_a_mesh_and_virtual_slices_come_first_along_each_axis():
    mesh = xs.HybridMesh(ici_mesh_shape=(2, 4), axis_names=("data", "model"))
    np.testing.assert_array_equal(mesh.get_logical_mesh(), np.arange(8).reshape(2, 4))
    assert mesh.dcn_mesh_shape == (1, 1) and isinstance(mesh, xs.Mesh)
    assert list(mesh.shape().items()) == [("data", 2), ("model", 4)]
    mesh = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1))
    np.testing.assert_array_equal(mesh.get_logical_mesh(), [[0, 1], [2, 3], [4, 5], [6, 7]])
    mesh = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(1, 2), axis_names=("x", "y"))
    np.testing.assert_array_equal(mesh.get_logical_mesh(), [[0, 1, 4, 5], [2, 3, 6, 7]])
    t = xs.mark_sharding(torch.ones(4, 4).to("jax"), mesh, ("x", "y"))
    assert t.sharding_spec == "{devices=[2,4]0,1,4,5,2,3,6,7}"


def test_no_hybrid_mesh():
    for given, message in (
        ({"ici_mesh_shape": (2, 2)}, r"1 slices of 4 devices.*are 4 devices, there are 8"),
        ({"ici_mesh_shape": (2, 4), "dcn_mesh_shape": (2, 1)}, "are 16 devices, there are 8"),
        ({"ici_mesh_shape": (8,), "dcn_mesh_shape": (1, 1)}, "dcn has 2 entries for 1 names"),
        ({"ici_mesh_shape": (2, 4), "axis_names": ("x",)}, "ici has 2 entries for 1 names"),
    ):
        with pytest.raises(ValueError, match=message):
            xs.HybridMesh(**given)


def test_slices_that_devices_tell_of_must_be_arranged(monkeypatch):
    devices = [types.SimpleNamespace(slice_index=n // 4) for n in range(8)]
    monkeypatch.setattr(hybrid_module.jax, "devices", lambda: devices)
    with pytest.raises(ValueError, match=r"in 2 slices, and dcn_mesh_shape \(1, 1\) arranges 1"):
        xs.HybridMesh(ici_mesh_shape=(2, 4))
