"""The first example; and training split by the batch, and with all of it split."""

import numpy as np
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn
from torch_xla.distributed.spmd import Mesh, XLAShardedTensor

xr.use_spmd()
assert xr.is_spmd()
num_devices = xr.global_runtime_device_count()
device_ids = np.array(range(num_devices))
mesh = Mesh(device_ids, (2, 4), ("x", "y"))

whole = torch.randn(8, 4)
t = whole.to(xm.xla_device())
m1_sharded = xs.mark_sharding(t, mesh, (0, 1))
assert isinstance(m1_sharded, XLAShardedTensor)
assert m1_sharded.sharding_spec == "{devices=[2,4]0,1,2,3,4,5,6,7}"
xm.mark_step()
shards = m1_sharded.local_shards
assert [shard.data.shape for shard in shards] == [(4, 1)] * 8
assert torch.equal(shards[5].data, whole[tuple(shards[5].indices)])
# This example of the RFC fails in torch_xla 2.9.
assert torch.allclose(((m1_sharded + 1) @ m1_sharded.t()).cpu(), (whole + 1) @ whole.t(), atol=1e-5)


def train(device, mark=lambda t, is_input: t):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.GELU(), nn.Linear(16, 8)).to(device)
    for param in model.parameters():
        mark(param, False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn, losses = nn.CrossEntropyLoss(), []
    for _ in range(2):
        data, target = torch.randn(16, 3, 8, 8), torch.randint(0, 8, (16,))
        data, target = data.to(device), target.to(device)
        mark(data, True)
        optimizer.zero_grad()
        loss = loss_fn(model(data), target)
        loss.backward()
        optimizer.step()
        if device != "cpu":
            xm.mark_step()
        losses.append(loss.item())
    return losses, model


def batch(t, is_input):
    if is_input:
        input_mesh = xs.Mesh(device_ids, (num_devices, 1, 1, 1), ("B", "C", "W", "H"))
        xs.mark_sharding(t, input_mesh, range(4))


def everything(t, is_input):
    xs.mark_sharding(t, xs.Mesh(device_ids, (num_devices,) + (1,) * (t.dim() - 1)), range(t.dim()))


want, _ = train("cpu")
for mark in (batch, everything):
    ours, model = train(xm.xla_device(), mark)
    assert np.allclose(ours, want, rtol=1e-4)
assert [shard.data.shape for shard in model[1].weight.local_shards] == [(2, 192)] * 8
