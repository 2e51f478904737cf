"""torch's autograd on the `jax` device: hooks, checkpoints, higher derivatives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import isoshard.torch_bridge as xs
from tests.torch_bridge.training.test_training import close, draw, make, mlp

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


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).to(x.device)
        y = checkpoint(block, x, use_reentrant=reentrant)
        y = checkpoint(lambda a: torch.sin(a) * a, y, use_reentrant=reentrant)
        y.sum().backward()
        return [x.grad, block[0].weight.grad]

    both(program)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_its_dropout(reentrant):
    x = torch.ones(64, device="jax", requires_grad=True)
    y = checkpoint(lambda a: functional.dropout(a * 1, 0.5), x, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), y.detach().cpu())
    assert 0 < y.count_nonzero().item() < 64


class Clamped(torch.autograd.Function):
    """A user's own derivative: straight through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bound: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.bound = bound
        return x.clamp(-bound, bound)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 2 * ctx.bound), None


def test_a_users_own_function():
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        y = Clamped.apply(x, 0.5)
        (y * 3).sum().backward()
        return [y, x.grad]

    both(program)


def test_retain_graph_and_accumulation():
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        loss = (x**3).sum()
        loss.backward(retain_graph=True)
        first = x.grad.clone()
        loss.backward()
        (x * 2).sum().backward()
        return [first, x.grad]

    both(program)
    x = torch.ones(2, device="jax", requires_grad=True)
    loss = (x**2).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"backward through the graph a second time"):
        loss.backward()


def test_double_backward():
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        y = (x.tanh() @ x.exp().t()).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        g.square().sum().backward()
        return [g, x.grad]

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


def test_autograd_grad_and_unused_inputs():
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        unused = torch.ones(2, device=x.device, requires_grad=True)
        got = torch.autograd.grad(x.sin().sum(), (x, unused), allow_unused=True)
        assert got[1] is None
        return [got[0], *torch.autograd.grad(x * 2, x, torch.ones_like(x))]

    both(program)


def test_no_grad_inference_mode_and_detach():
    x = torch.ones(3, device="jax", requires_grad=True)
    with torch.no_grad():
        y = x * 2
    assert not y.requires_grad and y.grad_fn is None
    with torch.no_grad(), torch.enable_grad():
        assert (x * 2).requires_grad
    with torch.inference_mode():
        z = x * 3
    assert z.tolist() == [3, 3, 3]
    (x.detach() * x).sum().backward()
    assert x.grad.tolist() == [1, 1, 1]


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


def test_func_transforms_and_functional_call():
    model = mlp().to("jax")
    values = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert torch.func.functional_call(model, values, draw(2, 6).to("jax")).count_nonzero() == 0


def test_anomaly_mode_and_leaves():
    x = torch.ones(3, device="jax", requires_grad=True)
    assert x.is_leaf and x.grad_fn is None and (x * 2).grad_fn is not None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to("jax")):
        (x.exp()).sum().backward()
    np.testing.assert_allclose(x.grad.cpu(), np.full(3, np.e), rtol=1e-6)


@pytest.mark.parametrize(
    "function", [lambda x: x / (1 + 2j), lambda x: x * (2 - 1j), lambda x: 1j - x]
)
def test_gradients_through_arithmetic_with_a_complex_number(function):
    gradients = []
    for device in ("cpu", "jax"):
        x = torch.tensor([1.0, -2.0]).to(device).requires_grad_()
        out = function(x)
        assert out.dtype == torch.complex64
        (out.real * 2 + out.imag).sum().backward()
        gradients.append(x.grad.cpu())
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_complex128_number_beside_floats_is_as_any_number():
    product = torch.ones(2, device="jax") * torch.tensor(1j, dtype=torch.complex128)
    assert product.dtype == torch.complex64 and product.tolist() == [1j, 1j]
