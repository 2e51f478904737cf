"""Fused optimizers take a learning rate on the CPU, of any shape with one number, as on CUDA."""

import copy

import pytest
import torch
from torch import nn

from isoshard.torch_bridge.distributed.tensor import distribute_module, distribute_tensor
from tests.torch_bridge.dtensor.operators.placed import S0, data, mesh_of

FUSED = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * self.linear(x)


def rows(name, module, mesh):
    for key, parameter in list(module.named_parameters(recurse=False)):
        placements = [S0] if parameter.dim() else None
        placed = distribute_tensor(parameter.detach(), mesh, placements)
        module.register_parameter(key, nn.Parameter(placed))


@pytest.mark.parametrize(("kind", "shape"), [*zip(FUSED, [(), (1,), (1, 1), (1,)], strict=True)])
def test_steps_are_the_cpus(kind, shape):
    torch.manual_seed(0)
    there = Scaled()
    here = distribute_module(copy.deepcopy(there), mesh_of((4,)), rows)
    rate = torch.full(shape, 0.1)
    for model, device in ((there, "cpu"), (here, "jax")):
        optimizer = kind(model.parameters(), lr=rate, fused=True)
        for step in range(2):
            optimizer.zero_grad()
            model(data(4, 8, seed=step).float().to(device)).square().sum().backward()
            optimizer.step()
    for want, got in zip(there.parameters(), here.parameters(), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-4, atol=1e-5)
