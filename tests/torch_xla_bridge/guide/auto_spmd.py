"""Auto-sharding of a whole program: the compiler chooses what nobody marked."""

import os

os.environ["XLA_AUTO_SPMD_MESH"] = "4,2"

import torch
import torch_xla
import torch_xla.runtime as xr

xr.use_spmd(auto=True)
assert xr.is_spmd() and torch_xla._XLAC._xla_get_auto_sharding()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
given = torch.randn(16, 32)
want = model(given)
want.square().mean().backward()
gradients = [parameter.grad.clone() for parameter in model.parameters()]

model.zero_grad()
model = model.to(torch_xla.device())
got = model(given.to("xla"))
got.square().mean().backward()
torch_xla.sync()
assert torch.allclose(got.cpu(), want, atol=1e-5)
for parameter, gradient in zip(model.parameters(), gradients, strict=True):
    assert torch.allclose(parameter.grad.cpu(), gradient, atol=1e-6)
