"""Fused optimizers and gradient scaling against their CPU kernels: options, skipped steps."""

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


def parameters(device: str) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=source) for shape in ((3, 4), (4,))]
    return [p.to(device).requires_grad_() for p in made]


def trained(device: str, name: str, *, scale=None, found=(0, 0)):
    """Parameters and gradients after a step for each of `found`."""
    optimizer, options = CASES[name]
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
    return [*(p.detach() for p in params), *(p.grad for p in params)]


def test_steps_are_those_of_the_cpu():
    """By every option; with scaled gradients, of which the second step's are infinite."""
    scaled = {"scale": 8.0, "found": (0, 1, 0)}
    runs = [(name, {}) for name in CASES] + [("adamw", scaled), ("momentum", scaled)]
    got = [trained("jax", name, **options) for name, options in runs]
    for (name, options), have in zip(runs, got, strict=True):
        want = trained("cpu", name, **options)
        torch.testing.assert_close([t.cpu() for t in have], want, rtol=1e-5, atol=1e-6)


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


def test_unscaling_and_adapting_the_scale():
    got = []
    for device in ("cpu", "jax"):
        results = []
        for bad in (None, torch.inf, torch.nan):
            grads = [torch.tensor([2.0, -4.0]), torch.tensor([[bad or 8.0]])]
            grads, inverse = [g.to(device) for g in grads], torch.tensor(0.5, device=device)
            found = torch.zeros((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
            results += [*grads, found]
        for scale in (4.0, 3e38):
            for streak in (0, 2):
                for inf in (0.0, 1.0):
                    value, inf = (torch.tensor(x, device=device) for x in (scale, inf))
                    count = torch.tensor(streak, dtype=torch.int32, device=device)
                    assert torch._amp_update_scale_(value, count, inf, 2.0, 0.5, 3) is value
                    results += [value, count]
        got.append([result.cpu() for result in results])
    torch.testing.assert_close(got[1], got[0], equal_nan=True)


def test_unscaling_an_expanded_tensor_is_refused():
    grads = [torch.ones(1, device="jax").expand(3)]
    with pytest.raises(RuntimeError, match="writes to an expanded tensor"):
        torch._amp_foreach_non_finite_check_and_unscale_(
            grads, torch.zeros((), device="jax"), torch.ones((), device="jax")
        )
