"""DTensor's verbs, automatic layouts, and pictures; and the names of torch_xla's modules."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import isoshard as iso
from isoshard import P, ShardingError, SpecError, make_mesh
from isoshard.torch_bridge.spmd.auto import auto_mesh, auto_spec
from isoshard.torch_bridge.torch_xla.distributed import spmd as xs
from isoshard.torch_bridge.torch_xla.distributed.spmd import (
    api,
    debugging,
    xla_sharded_tensor,
    xla_sharding,
)


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# --- Meshes and placements -----------------------------------------------------------------------


@pytest.mark.parametrize("names", [None, ("a", "b")])
def test_a_device_mesh_becomes_a_mesh(names):
    ranks = torch.arange(8).flip(0).reshape(2, 4)
    mesh = api.convert_to_xla_mesh(DeviceMesh("xla", ranks, mesh_dim_names=names))
    assert mesh.device_ids.tolist() == ranks.flatten().tolist()
    assert (mesh.mesh_shape, mesh.axis_names) == ((2, 4), names)
    assert api.convert_to_xla_mesh(init_device_mesh("xla", (8,))).mesh_shape == (8,)
    assert api.convert_to_xla_mesh(DeviceMesh("xla", list(range(4)))).size() == 4


@pytest.mark.parametrize(
    ("placements", "spec"),
    [
        ([Replicate(), Shard(0)], (1, None)),
        ([Shard(1), Shard(0)], (1, 0)),
        ([Shard(0), Shard(0)], ((0, 1), None)),
        ([Shard(-1), Replicate()], (None, 0)),
        ([Replicate(), Replicate()], (None, None)),
    ],
)
def test_placements_become_a_spec(placements, spec):
    assert api.convert_to_xla_partition_spec(data(8, 8), placements) == spec
    with pytest.raises(NotImplementedError, match="Partial"):
        api.convert_to_xla_partition_spec(data(8, 8), [Partial(), Shard(0)])


MESHES = {
    "DeviceMesh": lambda: DeviceMesh("xla", torch.arange(8).reshape(2, 4)),
    "xs.Mesh": lambda: xs.Mesh(range(8), (2, 4)),
    "jax": lambda: make_mesh((2, 4), ("x", "y")),
}


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("where", ["cpu", "jax"])
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


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_leaf_from_the_cpu_is_a_leaf(requires_grad):
    source = data(8).requires_grad_(requires_grad)
    found = xs.xla_distribute_tensor(source, MESHES["xs.Mesh"](), [Shard(0), Replicate()])
    assert found.is_leaf and found.requires_grad is requires_grad and found is not source
    computed = xs.xla_distribute_tensor(source * 2, MESHES["xs.Mesh"](), [Shard(0), Replicate()])
    assert computed.is_leaf is not requires_grad
    if requires_grad:
        (found + computed).sum().backward()
        assert found.grad.tolist() == [1.0] * 8 and source.grad.tolist() == [2.0] * 8


def test_a_parameter_stays_a_leaf():
    mesh = DeviceMesh("xla", list(range(8)))
    layer = nn.Linear(8, 8).to("jax")
    found = xs.xla_distribute_tensor(layer.weight, mesh, [Shard(0)])
    assert found is layer.weight and found.is_leaf and found.requires_grad


def test_what_is_not_distributed():
    mesh = MESHES["DeviceMesh"]()
    with pytest.raises(ValueError, match="1 placements for a mesh of 2 axes"):
        xs.xla_distribute_tensor(data(8), mesh, [Shard(0)])
    with pytest.raises(ShardingError, match=r"of device type 'xla' or 'jax'.*'cuda'"):
        xs.xla_distribute_tensor(data(8), DeviceMesh("cuda", [0], _init_backend=False, _rank=0))
    t = xs.xla_distribute_tensor(data(8, 8), mesh, [Shard(0), Replicate()])
    with pytest.raises(ShardingError, match=r"marked .* already"):
        xs.xla_distribute_tensor(t, mesh, [Shard(1), Replicate()])


class DTensor(torch.Tensor):
    """Called as torch's class, without a process group."""


def test_a_dtensor_is_refused():
    with pytest.raises(ShardingError, match=r"one process's part.*full_tensor\(\)"):
        xs.xla_distribute_tensor(data(8).as_subclass(DTensor), MESHES["xs.Mesh"]())


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


@pytest.mark.parametrize("where", ["cpu", "jax"])
def test_the_automatic_policy_lays_parameters_out_by_its_rule(where):
    mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    model = net().to(where)
    xs.mark_sharding(model[0].bias, mesh, ("y",)) if where == "jax" else None
    assert xs.xla_distribute_module(model, mesh, xs.auto_policy) is model
    specs = {name: tuple(p.partition_spec) for name, p in model.named_parameters()}
    assert specs == {
        "0.weight": (("x", "y"),),
        "0.bias": ("y",) if where == "jax" else (("x", "y"),),
        "2.weight": (None, ("x", "y")),
        "2.bias": (),
    }
    again = xs.xla_distribute_module(net(), mesh, xs.auto_policy)
    assert again[0].weight.sharding_spec == model[0].weight.sharding_spec
    torch.testing.assert_close(model(data(4, 16).to("jax")).cpu(), net()(data(4, 16)))


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "spec"),
    [
        ((64, 16), (2, 4), ((0, 1), None)),
        ((16, 16), (2, 4), ((0, 1), None)),  # of two alike the first
        ((100, 16), (2, 4), (None, (0, 1))),
        ((12, 6), (2, 4), (1, None)),
        ((6, 10), (2, 4), (None, 0)),
        ((3, 5), (2, 4), (None, None)),
        ((8,), (8,), (0,)),
        ((8,), (1,), (None,)),
        ((), (8,), ()),
        ((0, 3), (8,), (None, None)),
    ],
)
def test_the_rule(shape, mesh_shape, spec):
    assert auto_spec(shape, mesh_shape) == spec


def test_the_automatic_mesh(monkeypatch):
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


def test_with_xla_switches_spmd_on(monkeypatch):
    monkeypatch.setenv("XLA_USE_SPMD", "0")  # and what was set comes back after the test

    @api.with_xla
    def function(self, value):
        """Say so."""
        return self, value

    from isoshard.torch_bridge.torch_xla import runtime

    assert not runtime.is_spmd()
    assert function(1, value=2) == (1, 2) and runtime.is_spmd()
    assert function.__name__ == "function" and function.__doc__ == "Say so."


UNCHANGED = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
from isoshard.torch_bridge import drop_in
drop_in.install()
import torch
from torch import nn
from torch.distributed.tensor import (
    DeviceMesh, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh)
import torch_xla
import torch_xla.runtime as xr
from torch_xla.distributed.spmd import XLAShardedTensor, auto_policy

xr.use_spmd()
mesh = DeviceMesh("xla", torch.arange(8).reshape(2, 4))
t = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(0)])
assert isinstance(t, XLAShardedTensor) and t.device.type == "xla", t.device
print(t.sharding_spec, t.placements)
line = init_device_mesh("xla", mesh_shape=(8,))

def shard_params(name, module, mesh):
    if isinstance(module, nn.Linear):
        for parameter in module.parameters():
            distribute_tensor(parameter, mesh, [Shard(0)])

model = distribute_module(nn.Linear(8, 16).to("xla"), line, shard_params)
print(model.weight.sharding_spec)
model = distribute_module(nn.Linear(8, 16), line, auto_policy)
print(model.weight.sharding_spec)
"""


def test_torchs_own_verbs_arrive_here_under_the_drop_in():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", UNCHANGED],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    everything = "0,1,2,3,4,5,6,7"
    assert done.stdout.splitlines() == [
        f"{{devices=[8,1]{everything}}} (Shard(dim=0), Shard(dim=0))",
        f"{{devices=[8,1]{everything}}}",
        f"{{devices=[8,1]{everything}}}",
    ]


# --- Pictures ------------------------------------------------------------------------------------


def boxes(text: str) -> list[list[str]]:
    rows = [line.strip("│").split("│") for line in text.splitlines() if "CPU" in line]
    return [[box.strip() for box in row] for row in rows]


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        (("x", "y"), [["CPU 0", "CPU 1", "CPU 2", "CPU 3"], ["CPU 4", "CPU 5", "CPU 6", "CPU 7"]]),
        (("x", None), [["CPU [0, 1, 2, 3]"], ["CPU [4, 5, 6, 7]"]]),
        ((None, "x"), [["CPU [0, 1, 2, 3]", "CPU [4, 5, 6, 7]"]]),
        ((None, None), [["CPU [0, 1, 2, 3, 4, 5, 6, 7]"]]),
    ],
)
def test_a_tensors_layout_is_drawn(spec, want, capsys):
    mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    t = xs.mark_sharding(data(8, 8).to("jax"), mesh, spec)
    table = debugging.visualize_tensor_sharding(t, use_color=False)
    assert boxes(capsys.readouterr().out) == want
    assert (table.row_count, len(table.columns)) == (len(want), len(want[0]))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("{devices=[4]0,1,2,3}", [["CPU 0", "CPU 1", "CPU 2", "CPU 3"]]),
        ("{devices=[2,2]<=[4]}", [["CPU 0", "CPU 1"], ["CPU 2", "CPU 3"]]),
        ("{devices=[1,2]5,3}", [["CPU 5", "CPU 3"]]),
        (
            "{devices=[2,1,2,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}",
            [["CPU [0, 1]", "CPU [2, 3]"], ["CPU [4, 5]", "CPU [6, 7]"]],
        ),
        ("{devices=[2,2,2]0,1,2,3,4,5,6,7}", [["CPU 0", "CPU 1"], ["CPU 2", "CPU 3"]]),
        ("", [["CPU [0, 1, 2, 3, 4, 5, 6, 7]"]]),
    ],
)
def test_a_string_is_drawn(text, want, capsys):
    debugging.visualize_sharding(text, use_color=False)
    assert boxes(capsys.readouterr().out)[:2] == want


def test_the_size_of_a_picture(capsys):
    text = "{devices=[1,2]0,1}"

    def drawn(**options):
        debugging.visualize_sharding(text, use_color=False, **options)
        lines = capsys.readouterr().out.splitlines()
        return len(lines), max(map(len, lines))

    assert drawn() == (5, 21)
    assert drawn(min_width=12) == (5, 27)
    assert drawn(scale=2.0) == (11, 21)
    assert drawn(max_width=16)[1] <= 16


def test_colours_need_a_terminal_that_has_them(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    debugging.visualize_sharding("{devices=[1,2]0,1}")
    out = capsys.readouterr().out
    assert "\x1b[" in out and "│" not in out


def test_what_is_not_drawn():
    with pytest.raises(ShardingError, match=r"\(3,\) on .* has no layout to draw; mark it"):
        debugging.visualize_tensor_sharding(data(3))
    with pytest.raises(SpecError, match="must stand in braces"):
        debugging.visualize_sharding("nonsense")


# --- Names ---------------------------------------------------------------------------------------

# torch_xla 2.9.0: the public names of its SPMD modules (its own imports of other modules left out).
SPMD = """HybridMesh Mesh ShardingSpec ShardingType XLAPatchedLinear XLAShard XLAShardedTensor
_mark_manual_sharding annotate_custom_sharding apply_backward_optimization_barrier auto_policy
clear_sharding disable_manual_sharding enable_manual_sharding get_1d_mesh get_global_mesh
mark_sharding mark_sharding_with_gradients set_global_mesh shard_as wrap_if_sharded
xla_distribute_module xla_distribute_tensor xla_patched_nn_linear_forward"""
SHARDING = """EinsumLinear HybridMesh MarkShardingFunction Mesh PartitionSpec ShardingSpec
ShardingType XLAPatchedLinear XLAShard XLAShardedTensor _mark_manual_sharding
annotate_custom_sharding apply_backward_optimization_barrier apply_xla_patch_to_nn_linear
clear_sharding disable_manual_sharding enable_manual_sharding get_1d_mesh get_global_mesh
mark_sharding mark_sharding_with_gradients set_global_mesh shard_as unwrap_sharded_tensor
wrap_as_sharded_tensor wrap_if_sharded xla_patched_nn_linear_forward"""
API = """auto_policy convert_to_xla_mesh convert_to_xla_partition_spec with_xla
xla_distribute_module xla_distribute_tensor"""


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (xs, SPMD),
        (xla_sharding, SHARDING),
        (api, API),
        (xla_sharded_tensor, "XLAShard XLAShardedTensor"),
        (debugging, "visualize_sharding visualize_tensor_sharding"),
    ],
    ids=lambda value: getattr(value, "__name__", "names"),
)
def test_torch_xlas_names_are_there_and_documented(module, names):
    for name in names.split():
        found = getattr(module, name)
        assert name == "PartitionSpec" or found.__doc__
    if hasattr(module, "__all__"):
        exported: dict = {}
        exec(f"from {module.__name__} import *", exported)
        assert set(module.__all__) <= set(exported)
        assert set(names.split()) <= set(module.__all__)


def test_the_mirror_offers_the_same_objects():
    import isoshard.torch_bridge as bridge

    for name in ("Mesh", "ShardingSpec", "ShardingType", "XLAShard", "XLAShardedTensor"):
        assert getattr(bridge, name) is getattr(xs, name) is getattr(xla_sharding, name)
    assert iso.visualize("{devices=[2]0,1}")
