"""Fused optimizers against their CPU kernels: options, gradient scales, steps that are skipped."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge  # noqa: F401  (registers the device)

CASES = {
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.2}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
}


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (4,))
    made = [torch.randn(shape, generator=source).to(dtype) for shape in shapes]
    return [p.to(device).requires_grad_() for p in made]


def trained(device: str, optimizer, options, *, scale=None, found=(0, 0, 0)):
    """Parameters and gradients after three steps."""
    params = parameters(device)
    made = optimizer(params, lr=0.1, fused=True, **options)
    for step, inf in enumerate(found):
        for param in params:
            source = torch.Generator().manual_seed(step)
            param.grad = torch.randn(param.shape, generator=source).to(device)
        if scale is not None:
            made.grad_scale = torch.tensor(scale, device=device)
            made.found_inf = torch.tensor(float(inf), device=device)
        made.step()
    return [p.detach().cpu() for p in params], [p.grad.cpu() for p in params]


@pytest.mark.parametrize("name", CASES)
def test_three_steps(name):
    optimizer, options = CASES[name]
    want, got = (trained(device, optimizer, options) for device in ("cpu", "jax"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_scaled_gradients_and_a_skipped_step(name):
    optimizer, options = CASES[name]
    settings = {"scale": 8.0, "found": (0, 1, 0)}
    want, got = (trained(device, optimizer, options, **settings) for device in ("cpu", "jax"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_learning_rate_in_a_tensor():
    got = []
    for device in ("cpu", "jax"):
        params = parameters(device)
        rate = torch.tensor(0.1, device=device)
        made = torch.optim.AdamW(params, lr=rate, fused=True)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            made.step()
            rate.mul_(0.5)
        got.append([p.detach().cpu() for p in params])
    torch.testing.assert_close(got[1], got[0], rtol=1e-5, atol=1e-6)
