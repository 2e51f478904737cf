"""A decoder whose layers are split by columns and rows, with torch's own `parallelize_module`."""

import functools

import numpy as np
import torch
import torch_xla
import torch_xla.runtime as xr
from _models import Decoder, losses_of, on_cpu, started, token_loss, tokens
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

xr.use_spmd()
STEPS = 2
batch = tokens(4)
sgd = functools.partial(torch.optim.SGD, lr=0.1)
mesh = init_device_mesh("xla", (xr.global_runtime_device_count(),))
plan = {
    "mlp.up": ColwiseParallel(),
    "mlp.gate": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}
model = started(Decoder, torch_xla.device())
for layer in model.layers:
    parallelize_module(layer, mesh, plan)
assert model.layers[0].mlp.up.weight.sharding_spec == "{devices=[8,1]0,1,2,3,4,5,6,7}"
assert model.layers[0].mlp.down.weight.sharding_spec == "{devices=[1,8]0,1,2,3,4,5,6,7}"

optimizer = sgd(model.parameters())
here = [t.to("xla") for t in batch]
losses = losses_of(model, optimizer, token_loss, here, STEPS, torch_xla.sync)
assert np.allclose(losses, on_cpu(Decoder, token_loss, sgd, batch, STEPS), rtol=1e-4)
assert losses[-1] < losses[0]
mlp = model.layers[0].mlp  # and the pieces stay where they are
assert [p.local_shards[0].data.shape for p in (mlp.up.weight, mlp.down.weight)] == [
    (4, 16),
    (16, 4),
]
