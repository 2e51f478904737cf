"""torch's autograd on the `jax` device: hooks, accumulation, gradients of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import isoshard.torch_bridge as xs
from tests.torch_bridge.training.test_training import close, draw, make

functional = torch.nn.functional


def both(function: Callable[[torch.Tensor], Any], *shape: int) -> None:
    """Compare tensors that a function returns for a leaf on each device."""
    data = draw(*(shape or (3, 4)))
    want = function(data.clone().requires_grad_())
    got = function(data.clone().to("jax").requires_grad_())
    for g, w in zip(got, want, strict=True):
        close(g, w)


def test_tensor_hooks():
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        y = x.sin()
        y.register_hook(lambda g: g * 3)
        handle = y.register_hook(lambda g: g * 100)
        handle.remove()
        x.register_hook(seen.append)
        x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad * 2))
        y.retain_grad()
        (y * y).sum().backward()
        return [x.grad, y.grad, *seen]

    both(program)


def test_module_hooks():
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        seen: list[torch.Tensor] = []
        layer = torch.nn.Linear(4, 2).to(x.device)
        layer.register_forward_pre_hook(lambda m, inputs: (inputs[0] * 2,))
        layer.register_forward_hook(lambda m, inputs, output: output + 1)
        layer.register_full_backward_hook(lambda m, gi, go: seen.extend([*gi, *go]))
        layer.register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
        out = layer(x)
        out.square().sum().backward()
        return [out, x.grad, layer.weight.grad, *seen]

    both(program)


def test_gradient_penalty_of_an_mlp():
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Softplus(), torch.nn.Linear(8, 1)
        )
        model.to(x.device)
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        ((g.norm(dim=1) - 1) ** 2).mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    both(program)


def test_gradients_accumulate_over_micro_batches():
    want, x, y = make("mlp")
    got = copy.deepcopy(want).to("jax")
    functional.cross_entropy(want(x), y).backward()
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        (functional.cross_entropy(got(a.to("jax")), b.to("jax")) / 4).backward()
        xs.sync()
    for g, w in zip(got.parameters(), want.parameters(), strict=True):
        close(g.grad, w.grad)


def test_zero_grad_keeps_or_drops_the_memory():
    x = torch.nn.Parameter(torch.ones(3, device="jax"))
    optimizer = torch.optim.SGD([x], lr=1.0)
    x.sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert x.grad.tolist() == [0, 0, 0]
    x.sum().backward()
    assert x.grad.tolist() == [1, 1, 1]
    optimizer.zero_grad()
    assert x.grad is None


def test_gradients_through_arithmetic_with_a_complex_number():
    """Of complex128, too: beside floats it is as any number."""

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        gradients = []
        for out in (x / (1 + 2j), x * (2 - 1j), 1j - x):
            assert out.dtype == torch.complex64
            gradients += torch.autograd.grad((out.real * 2 + out.imag).sum(), x)
        return gradients

    both(program)
    product = torch.ones(2, device="jax") * torch.tensor(1j, dtype=torch.complex128)
    assert product.dtype == torch.complex64 and product.tolist() == [1j, 1j]
