"""Run in a process of its own: modules of DTensors are exported, and their models compared.

Of a group of one process the weights are exported too; of a fake group of four only the layout,
since its collectives move nothing.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import isoshard as iso
from tests.onnx_bridge.torch_models import MLP, seeded

STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}
AXES = ("dp", "tp")


def specs(model):
    held = iso.onnx.layout(model).parameters
    return {name: list(map(str, by_stage[0].spec)) for name, by_stage in held.items()}


def run(model, x):
    return np.asarray(iso.onnx.compile(model)(x.numpy())).tolist()


def fault(function):
    try:
        function()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def whole(x, mesh, found):
    """Exports with the weights."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = init_device_mesh("cpu", (1, 1), mesh_dim_names=AXES)
    module = parallelize_module(seeded(MLP), ranks["tp"], STYLES)
    iso.metrics.reset()
    model = iso.onnx.export_torch(module, (x,), mesh)
    found["parallel"] = specs(model), run(model, x)
    found["gathers"] = iso.metrics.counters()["gathers"]
    found["hooks"] = len(module.up._forward_hooks), len(module.up._forward_pre_hooks)
    module = fully_shard(seeded(MLP), mesh=ranks["dp"])
    found["fsdp"] = fault(lambda: iso.onnx.export_torch(module, (x,), mesh))
    with torch.device("meta"):
        twin = MLP().eval()
    model = iso.onnx.export_torch(module, (x,), mesh, twin=twin)
    found["twin"] = specs(model), run(model, x)
    with torch.device("meta"):
        other = torch.nn.Sequential(torch.nn.Linear(16, 8)).eval()
    found["other"] = fault(lambda: iso.onnx.export_torch(module, (x,), mesh, twin=other))
    module = seeded(MLP)
    nameless = init_device_mesh("cpu", (1,))
    module.up.weight = torch.nn.Parameter(
        DTensor.from_local(module.up.weight.data, ranks["tp"], [Partial()])
    )
    module.down.weight = torch.nn.Parameter(DTensor.from_local(module.down.weight.data, nameless))
    found["faults"] = fault(lambda: iso.onnx.export_torch(module, (x,), mesh))
    dist.destroy_process_group()


def layout_only(x, found):
    """The mesh is that of the DTensors, on JAX's devices."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    ranks = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    module = parallelize_module(seeded(MLP), ranks["tp"], STYLES)
    model = iso.onnx.export_torch(module, (x,))
    found["fake"] = specs(model), dict(iso.onnx.layout(model).stages[0].mesh.shape)
    dist.destroy_process_group()


if __name__ == "__main__":
    iso.simulate_devices(8)
    found = {}
    x = torch.from_numpy(np.load(sys.argv[1]))
    whole(x, iso.make_mesh((2, 2), AXES), found)
    layout_only(x, found)
    Path(sys.argv[2]).write_text(json.dumps(found))
