"""An MLP that learns a fixed function: tensor parallel weights, a sharded loader, SGD."""

import numpy as np
import report
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

STEPS, BATCH = 10, 64

xr.use_spmd()
devices = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(devices), (2, devices // 2), ("data", "model"))
device = xm.xla_device()

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(32, 128),
    torch.nn.ReLU(),
    torch.nn.Linear(128, 128),
    torch.nn.Tanh(),
    torch.nn.Linear(128, 16),
)
inputs = torch.randn(STEPS * BATCH, 32)
targets = torch.tanh(inputs @ torch.randn(32, 16) / 4)

model = model.to(device)
SPECS = {
    "0.weight": (1, None),  # by index
    "0.bias": (1,),
    "2.weight": ("data", "model"),  # by name
    "2.bias": ("model",),
    "4.weight": (("data", "model"), None),  # two mesh axes for one of the tensor
    "4.bias": (None,),
}
for name, parameter in model.named_parameters():
    report.mark(name, parameter, mesh, SPECS[name])

batches = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(inputs, targets), batch_size=BATCH
)
loader = pl.MpDeviceLoader(batches, device, input_sharding=xs.ShardingSpec(mesh, ("data", None)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
losses = []
for x, y in loader:
    report.note("x", x)
    report.note("y", y)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    xm.optimizer_step(optimizer)
    losses.append(loss.detach())
    torch_xla.sync()
report.finish(losses, model.named_parameters())
