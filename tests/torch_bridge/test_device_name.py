"""Messages name the device as its user does: `jax`, never the C++ type of its tensors."""

from __future__ import annotations

import pytest
import torch

functional = torch.nn.functional


def on(device, *shape):
    return torch.ones(shape, device=device)


def with_gradient(parameter, gradient):
    parameter.requires_grad_().grad = gradient


def hooked(hook):
    x = on("jax", 3).requires_grad_()
    y = x * 2
    y.register_hook(hook)
    return x, y.sum()


CASES = {
    "attention": (
        lambda: functional.scaled_dot_product_attention(
            on("jax", 1, 1, 2, 2), on("cpu", 1, 1, 2, 2), on("cpu", 1, 1, 2, 2)
        ),
        RuntimeError,
        "query.device: jax:0 key.device: cpu",
    ),
    "a gradient of the CPU": (
        lambda: with_gradient(on("jax", 3), on("cpu", 3)),
        RuntimeError,
        "gradient with device type 'cpu' to a tensor with device type 'jax'",
    ),
    "a hook that moves": (
        lambda: hooked(lambda gradient: gradient.cpu())[1].backward(),
        RuntimeError,
        r"was torch.jax.FloatTensor got torch.FloatTensor",
    ),
    "a hook that moves, autograd.grad": (
        lambda: torch.autograd.grad(*reversed(hooked(lambda gradient: gradient.cpu()))),
        RuntimeError,
        r"was torch.jax.FloatTensor got torch.FloatTensor",
    ),
    "pinned": (lambda: on("jax", 3).pin_memory(), RuntimeError, "cannot pin a tensor on jax:0"),
}


@pytest.mark.parametrize("name", CASES)
def test_messages(name):
    call, kind, words = CASES[name]
    with pytest.raises(kind, match=words) as caught:
        call()
    assert "lazy" not in str(caught.value).lower()
