"""What the RFC's examples are run with, for one process or several: model, data, functions."""

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard


class MyModule(nn.Module):
    """The RFC's, with its slips corrected."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.fc2 = nn.Linear(8, 8)
        self.relu = nn.ReLU()

    def forward(self, input):
        return self.relu(self.fc1(input) + self.fc2(input))


def numbers(*shape, seed):
    """The same in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def big_tensor():
    return numbers(100_000, 88, seed=1)


def local_tensor():
    return numbers(8, 8, seed=2)


def weights():
    return numbers(32, 8, seed=3)


def model_and_input():
    """The same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MyModule(), torch.randn(4, 8)


def partitions(distribute_tensor):
    """The RFC's two functions, over `distribute_tensor` of either world; the mesh is 2 x 2."""
    rowwise_placement = [Shard(0), Replicate()]

    def shard_params(mod_name, mod, mesh):
        for name, parameter in list(mod.named_parameters(recurse=False)):
            laid = distribute_tensor(parameter, mesh, rowwise_placement)
            mod.register_parameter(name, torch.nn.Parameter(laid))

    def shard_fc(mod_name, mod, mesh):
        if mod_name == "fc1":
            mod.weight = torch.nn.Parameter(distribute_tensor(mod.weight, mesh, rowwise_placement))

    return shard_params, shard_fc


def trained(model, x):
    """The losses of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        losses.append(whole.detach().cpu())
    return torch.stack(losses)
