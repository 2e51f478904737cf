"""torch's own `distribute_tensor` and `distribute_module` on meshes of isoshard."""

import importlib.util
import sys

import pytest
import torch
from torch import nn
from torch.distributed import DeviceMesh as TorchMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_bridge.distributed import init_device_mesh
from isoshard.torch_bridge.distributed.single_controller import DeviceType
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor
from tests import fresh

MESHES = {
    "xs.Mesh": lambda: xs.Mesh(range(8), (2, 4), ("dp", "tp")),
    "ours": lambda: init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp")),
    "xla": lambda: TorchMesh("xla", torch.arange(8).view(2, 4), mesh_dim_names=("dp", "tp")),
    "torch's init": lambda: torch.distributed.init_device_mesh(
        "xla", (2, 4), mesh_dim_names=("dp", "tp")
    ),
}


@pytest.fixture(params=list(MESHES))
def mesh(request):
    return MESHES[request.param]()


def test_tensors(mesh):
    t = distribute_tensor(torch.arange(16.0).reshape(8, 2), mesh, [Replicate(), Shard(0)])
    assert isinstance(t, XLAShardedTensor) and t.partition_spec == P("tp")
    assert torch.equal(t.cpu(), torch.arange(16.0).reshape(8, 2))
    assert distribute_tensor(torch.ones(8), mesh).placements == (Replicate(), Replicate())


def test_modules(mesh):
    def columns(name, module, given):
        assert given is mesh
        module._apply(lambda t: distribute_tensor(t, given, [Replicate(), Shard(0)]))

    module = distribute_module(nn.Linear(8, 8), mesh, columns)
    assert module.weight.partition_spec == P("tp") and isinstance(module.weight, nn.Parameter)
    with pytest.raises(RuntimeError, match="should only be called once"):
        distribute_module(module, mesh)


def test_errors_come_through(mesh):
    with pytest.raises(ValueError, match="1 placements"):
        distribute_tensor(torch.ones(8), mesh, [Shard(0)])


def test_nothing_named_torch_xla_is_left(mesh):
    distribute_tensor(torch.ones(8), mesh)
    assert not [name for name in sys.modules if name.partition(".")[0] == "torch_xla"]
    assert importlib.util.find_spec("torch_xla") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torch_xla.distributed.spmd")


def test_a_real_torch_xla_comes_first(tmp_path):
    package = tmp_path / "torch_xla" / "distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch_xla" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "spmd.py").write_text(
        "def xla_distribute_tensor(tensor, mesh, placements):\n    return 'the real one'\n"
    )
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import torch\n"
        "from torch.distributed import DeviceMesh\n"
        "from torch.distributed.tensor import distribute_tensor\n"
        "print(distribute_tensor(torch.ones(1), DeviceMesh('xla', [0])))\n"
    )
    done = fresh.run(program, cwd=tmp_path)
    assert done.stdout.strip() == "the real one", done.stderr


def test_meshes_of_other_devices_are_torchs():
    assert TorchMesh("cpu", [0], _init_backend=False, _rank=0).device_type == "cpu"
    kind = DeviceType("jax")
    assert kind == "jax" and kind == "xla" and not kind != "xla" and kind != "cuda"
    assert torch.zeros(2, device=kind).device.type == "jax"
