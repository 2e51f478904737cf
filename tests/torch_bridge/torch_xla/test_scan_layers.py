"""torch_xla's `scan_layers(layers, input)`: the layers in turn, as one loop."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from functorch.compile import default_partition, min_cut_rematerialization_partition

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.torch_xla.experimental.scan_layers import scan_layers


def data(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def stack() -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh())
        for _ in range(5)
    )


@pytest.mark.parametrize(
    "partition", [None, default_partition, min_cut_rematerialization_partition]
)
def test_numbers_gradients_and_buffers_are_those_of_the_layers_in_turn(partition):
    layers, x = stack(), data(6, 4)
    want, y = copy.deepcopy(layers), x.clone().requires_grad_()
    h = y
    for layer in want:
        h = layer(h)
    h.square().sum().backward()
    layers, z = layers.to("jax"), x.to("jax").requires_grad_()
    parameters = list(layers.parameters())
    scan_layers(layers, z, partition_fn=partition).square().sum().backward()
    assert all(a is b for a, b in zip(layers.parameters(), parameters, strict=True))
    torch.testing.assert_close(z.grad.cpu(), y.grad, rtol=1e-4, atol=1e-5)
    for one, two in zip(layers.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), two.grad, rtol=1e-4, atol=1e-5)
    for one, two in zip(layers.buffers(), want.buffers(), strict=True):
        torch.testing.assert_close(one.cpu(), two, rtol=1e-4, atol=1e-5)


def test_training_compiles_once(counted):
    layers, x = stack().to("jax"), data(6, 4).to("jax")
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    xs.sync()
    compilations = []
    for _ in range(4):
        optimizer.zero_grad()
        scan_layers(layers, x, is_layer_pure=True).square().mean().backward()
        optimizer.step()
        xs.sync()
        compilations.append(counted("compilations"))
    assert compilations[1:] == [compilations[1]] * 3


def test_tuples_are_arguments_and_nothing_is_left_on_the_layers():
    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, a, b):
            return torch.tanh(self.linear(a)), b + a

    layers = [Pair() for _ in range(3)]
    x = (data(2, 3), data(2, 3))
    want = x
    for layer in layers:
        want = layer(*want)
    layers = [layer.to("jax") for layer in layers]
    got = scan_layers(iter(layers), tuple(t.to("jax") for t in x))
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one.detach().cpu(), two.detach())
    assert list(layers[0].state_dict()) == ["linear.weight", "linear.bias"]
    again = copy.deepcopy(layers)
    torch.testing.assert_close(
        scan_layers(again, tuple(t.to("jax") for t in x))[1].detach().cpu(), want[1].detach()
    )
    seen = weakref.ref(layers[0])
    del layers, layer, got, one, two
    gc.collect()
    assert seen() is None


def test_no_layers_and_mistakes():
    x = data(2, 4).to("jax")
    assert scan_layers([], x) is x
    layers = [torch.nn.Linear(4, 4).to("jax"), torch.nn.Linear(4, 4, bias=False).to("jax")]
    with pytest.raises(ValueError, match="layer 1 differs from layer 0 in: bias"):
        scan_layers(layers, x)
    with pytest.raises(TypeError, match="must return what it takes"):
        scan_layers([torch.nn.Linear(4, 3).to("jax")], x)
    with pytest.raises(ValueError, match="possible are functorch"):
        scan_layers(layers[:1], x, partition_fn=print)
