"""amp: autocast, loss scaling, and optimizers that skip steps on the device."""

from __future__ import annotations

import pytest
import torch

from isoshard.torch_bridge.torch_xla import amp
from isoshard.torch_bridge.torch_xla.amp import syncfree
from isoshard.torch_bridge.torch_xla.core import xla_model as xm


def test_autocast_is_torchs():
    x = torch.randn(4, 4).to("jax")
    with amp.autocast(xm.xla_device()):
        product = x @ x
        assert torch.is_autocast_enabled("jax") and product.dtype == torch.bfloat16
    assert (x @ x).dtype == torch.float32
    with amp.autocast("jax:0", dtype=torch.float16):
        assert (x @ x).dtype == torch.float16
    with amp.autocast("jax", enabled=False):
        assert (x @ x).dtype == torch.float32
    with torch.autocast("jax", torch.bfloat16):
        torch.testing.assert_close(product, x @ x)

    @amp.autocast("jax")
    def decorated(x):
        return x @ x

    assert decorated(x).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="for jax:0, and 'cuda' was given"):
        amp.autocast("cuda")


def test_a_scaled_step():
    def train(device, scaler, make):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1).to(device)
        optimizer = make(model.parameters())
        for n in range(4):
            optimizer.zero_grad()
            x = torch.arange(8.0).reshape(2, 4).to(device) * (1e38 if n == 1 else 1)
            scaler.scale(model(x).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return model.weight.detach().cpu(), scaler.get_scale()

    want, scale = train("cpu", torch.amp.GradScaler("cpu", 8.0), lambda p: torch.optim.Adam(p, 0.1))
    got, ours = train("jax", amp.GradScaler(8.0), lambda p: syncfree.Adam(p, 0.1))
    torch.testing.assert_close(got, want)
    assert ours == scale == 4.0  # one step overflowed, and was skipped
    assert not amp.GradScaler(enabled=False).is_enabled()


@pytest.mark.parametrize(
    ("ours", "torchs", "options"),
    [
        (syncfree.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (syncfree.Adam, torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
        (syncfree.AdamW, torch.optim.AdamW, {"lr": 0.1}),
    ],
)
def test_steps_are_skipped_on_the_device(ours, torchs, options, counted):
    start, gradient = torch.randn(5), torch.randn(5)
    reference = torch.nn.Parameter(start.clone())
    wanted = torchs([reference], **options)
    parameter = torch.nn.Parameter(start.clone().to("jax"))
    optimizer = ours([parameter], **options)
    xm.mark_step()
    ran = counted("transfers.device_to_host")
    for skip in (None, 0.0, 1.0, 0.0, 1.0):
        parameter.grad = gradient.clone().to("jax")
        found = None if skip is None else torch.full((), skip).to("jax")
        optimizer.step(found_inf=found)
        assert not hasattr(optimizer, "found_inf")
        if not skip:
            reference.grad = gradient.clone()
            wanted.step()
        xm.mark_step()
    assert counted("transfers.device_to_host") == ran  # nothing was read
    torch.testing.assert_close(parameter.detach().cpu(), reference.detach())
    with pytest.raises(ValueError, match=r"one number, and its shape is \(1,\)"):
        optimizer.step(found_inf=torch.zeros(1, device="jax"))
    slow = ours([parameter], foreach=True, **options)
    with pytest.raises(ValueError, match="found_inf needs the fused step"):
        slow.step(found_inf=torch.zeros((), device="jax"))
    assert optimizer.step(lambda: 3.0) == 3.0
