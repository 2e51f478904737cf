"""Parameters stay the same objects when a module moves to `jax`, to a mesh and back."""

import copy

import pytest
import torch
from torch import nn

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(8)

    def forward(self, tokens):
        return self.norm(self.head(self.embedding(tokens)))


def moves():
    mesh = iso.make_mesh((2, 4), ("data", "model"))
    return {
        "to": lambda module: module.to("jax"),
        "shard": lambda module: iso.shard(module, mesh, P()),
        "reshard": lambda module: iso.reshard(iso.shard(module, mesh, P()), mesh, P()),
        "there and back": lambda module: module.to("jax").cpu(),
        "dtype": lambda module: module.to("jax").to(torch.bfloat16).float(),
    }


@pytest.mark.parametrize("name", moves())
def test_ties_and_optimizers_live_on(name):
    torch.manual_seed(0)
    module = Tied()
    weight = module.embedding.weight
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    reference = copy.deepcopy(module)
    module = moves()[name](module)
    assert module.embedding.weight is module.head.weight is weight
    assert optimizer.param_groups[0]["params"][0] is weight
    assert isinstance(weight, nn.Parameter) and weight.is_leaf and weight.requires_grad
    assert len(list(module.parameters())) == len(list(reference.parameters()))
    tokens = torch.arange(6)
    module(tokens.to(weight.device)).square().mean().backward()
    optimizer.step()
    reference(tokens).square().mean().backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    rtol = 2e-2 if name == "dtype" else 1e-5
    torch.testing.assert_close(
        weight.detach().cpu(), reference.head.weight.detach(), rtol=rtol, atol=rtol
    )


def test_gradients_move_along():
    module = nn.Linear(3, 2)
    module(torch.ones(1, 3)).sum().backward()
    module.to("jax")
    assert isinstance(module.weight.grad, xs.XLAShardedTensor)
    assert module.weight.grad.tolist() == [[1.0] * 3] * 2
    module.cpu()
    assert type(module.weight.grad) is torch.Tensor


def test_a_parameter_that_a_weak_reference_holds_is_replaced_in_every_place():
    import weakref

    module = Tied()
    old = module.head.weight
    kept = weakref.ref(old)
    module.to("jax")
    assert module.head.weight is module.embedding.weight is not old
    assert kept() is old and old.device.type == "cpu"


def test_other_moves_are_torchs_own():
    module = nn.Linear(2, 2)
    weight = module.weight
    assert module.to(torch.float64).weight is weight
    assert module.to("meta").weight is not weight


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_an_error_on_the_way_loses_nothing():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].bias = nn.Parameter(torch.zeros(2, dtype=torch.complex32))
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(TypeError, match="complex32"):
        module.to("jax")
    after = [p.detach().cpu() for p in module.parameters()]
    assert all(map(torch.equal, before[:3], after[:3])) and module[1].bias.device.type == "cpu"


def test_hooks_of_a_parameter_go_with_it():
    layer = torch.nn.Linear(2, 2)
    seen = []
    layer.weight.register_hook(lambda gradient: gradient * 3)
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.device.type))
    for device in ("jax", "cpu"):
        layer.to(device)(torch.ones(1, 2, device=device)).sum().backward()
        assert layer.weight.grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]
        layer.zero_grad()
    assert seen == ["jax", "cpu"]
