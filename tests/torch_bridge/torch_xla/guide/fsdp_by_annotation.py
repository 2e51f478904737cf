"""Fully sharded data parallelism, said with `mark_sharding` alone."""

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

xr.use_spmd()
num_devices = xr.global_runtime_device_count()
device_ids = np.arange(num_devices)


def train(device):
    torch.manual_seed(2)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 16)
    ).to(device)
    if device != "cpu":
        for _, param in model.named_parameters():
            shape = (num_devices,) + (1,) * (len(param.shape) - 1)
            mesh = xs.Mesh(device_ids, shape)
            xs.mark_sharding(param, mesh, range(len(param.shape)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        x = torch.randn(16, 32).to(device)
        if device != "cpu":
            xs.mark_sharding(x, xs.Mesh(device_ids, (num_devices, 1)), (0, 1))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device != "cpu":
            torch_xla.sync()
        losses.append(loss.item())
    return losses, model


ours, model = train(xm.xla_device())
assert np.allclose(ours, train("cpu")[0], rtol=1e-4)
assert [shard.data.shape for shard in model[0].weight.local_shards] == [(8, 32)] * 8
