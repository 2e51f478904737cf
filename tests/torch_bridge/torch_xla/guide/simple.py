"""The first example: one tensor, one layer and a training loop."""

import numpy as np
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.distributed.spmd import Mesh, XLAShardedTensor

xr.use_spmd()
assert xr.is_spmd()

mesh_shape = (2, 4)
num_devices = xr.global_runtime_device_count()
device_ids = np.array(range(num_devices))
mesh = Mesh(device_ids, mesh_shape, ("x", "y"))

whole = torch.randn(8, 4)
t = whole.to(xm.xla_device())
partition_spec = (0, 1)
m1_sharded = xs.mark_sharding(t, mesh, partition_spec)
assert isinstance(m1_sharded, XLAShardedTensor)
assert m1_sharded.sharding_spec == "{devices=[2,4]0,1,2,3,4,5,6,7}"
xm.mark_step()
shards = m1_sharded.local_shards
assert [shard.data.shape for shard in shards] == [(4, 1)] * 8
assert torch.equal(shards[5].data, whole[tuple(shards[5].indices)])
# This example of the RFC fails in torch_xla 2.9.
assert torch.allclose(((m1_sharded + 1) @ m1_sharded.t()).cpu(), (whole + 1) @ whole.t(), atol=1e-5)


class SimpleLinear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(128, 64)
        self.relu = torch.nn.ReLU()
        self.fc2 = torch.nn.Linear(64, 8)

    def forward(self, x):
        return self.fc2(self.relu(self.fc1(x)))


def train(device, mark):
    torch.manual_seed(0)
    model = SimpleLinear().to(device)
    mark(model.fc1.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = torch.nn.CrossEntropyLoss()
    losses = []
    model.train()
    for _ in range(5):
        data, target = torch.randn(16, 128), torch.randint(0, 8, (16,))
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        mark(data)
        loss = loss_fn(model(data), target)
        loss.backward()
        optimizer.step()
        if device != "cpu":
            xm.mark_step()
        losses.append(loss.item())
    return losses


ours = train(xm.xla_device(), lambda t: xs.mark_sharding(t, mesh, partition_spec))
assert np.allclose(ours, train("cpu", lambda t: t), rtol=1e-5)
