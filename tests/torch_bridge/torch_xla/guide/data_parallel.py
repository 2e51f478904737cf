"""Data parallelism: the batch is split, the parameters are whole on every device."""

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

xr.use_spmd()
num_devices = xr.global_runtime_device_count()
device_ids = np.arange(num_devices)
input_mesh = xs.Mesh(device_ids, (num_devices, 1, 1, 1), ("B", "C", "W", "H"))
partition_spec = range(4)


def train(device):
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(4):
        images, labels = torch.randn(16, 3, 8, 8).to(device), torch.randint(0, 10, (16,)).to(device)
        if device != "cpu":
            xs.mark_sharding(images, input_mesh, partition_spec)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if device != "cpu":
            torch_xla.sync()
        losses.append(loss.item())
    return losses


assert np.allclose(train(xm.xla_device()), train("cpu"), rtol=1e-5)
