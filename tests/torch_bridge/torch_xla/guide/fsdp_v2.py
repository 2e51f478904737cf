"""SpmdFullyShardedDataParallel, with gradient checkpointing and an own `shard_output`."""

import types

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.distributed.fsdp import checkpoint_module
from torch_xla.distributed.spmd import Mesh
from torch_xla.experimental.spmd_fully_sharded_data_parallel import (
    SpmdFullyShardedDataParallel as FSDPv2,
)

xr.use_spmd()
num_devices = xr.global_runtime_device_count()
mesh = Mesh(np.arange(num_devices), (num_devices, 1), ("fsdp", "model"))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class WithLogits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return types.SimpleNamespace(logits=self.block(x)[:, None, :])


def shard_output(output, mesh):
    xs.mark_sharding(output.logits, mesh, ("fsdp", None, None))


def train(module, wrap, read=lambda output: output):
    torch.manual_seed(3)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    device = "cpu" if wrap is None else xm.xla_device()
    model = module if wrap is None else wrap(module.to(device))
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        x = torch.randn(16, 16).to(device)
        if wrap is not None:
            x = xs.mark_sharding(x, mesh, ("fsdp", None))
        loss = read(model(x)).square().sum()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if wrap is not None:
            torch_xla.sync()
        losses.append(loss.item())
    if wrap is not None:
        for parameter in model.parameters():
            assert "devices=" in torch_xla._XLAC._get_xla_sharding_spec(parameter)
    return losses


want = train(Block(), None)
assert np.allclose(train(Block(), lambda m: FSDPv2(m, mesh=mesh)), want, rtol=1e-4)
assert np.allclose(train(Block(), lambda m: FSDPv2(m, mesh)), want, rtol=1e-4)
xs.set_global_mesh(mesh)
assert np.allclose(train(Block(), lambda m: FSDPv2(checkpoint_module(m))), want, rtol=1e-4)
logits = {"read": lambda output: output.logits}
want = train(WithLogits(), None, **logits)
ours = train(WithLogits(), lambda m: FSDPv2(m, mesh=mesh, shard_output=shard_output), **logits)
assert np.allclose(ours, want, rtol=1e-4)
