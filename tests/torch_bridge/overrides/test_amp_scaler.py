"""`torch.amp.GradScaler("jax")` against the CPU's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.core.runtime import metrics
from tests.torch_bridge.older_torch import BEFORE_2_13

functional = torch.nn.functional
SCALER = {"init_scale": 1024.0, "growth_interval": 2}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **o: torch.optim.SGD(p, 0.1, momentum=0.9, **o),
    "Adam": lambda p, **o: torch.optim.Adam(p, 0.05, amsgrad=True, weight_decay=0.1, **o),
    "Adagrad": lambda p, **o: torch.optim.Adagrad(p, 0.05, **o),
}
ADAGRAD_DECIDES = not BEFORE_2_13


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model_on(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    return torch.nn.Sequential(*layers).to(device)


def close(got: torch.nn.Module, want: torch.nn.Module) -> None:
    for g, w in zip(got.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(g.detach().cpu(), w.detach(), rtol=1e-4, atol=1e-5)


def train(
    device: str, name: str, *, options: Any, compiled: bool = False, clip: bool = False
) -> tuple[torch.nn.Module, list[float], torch.amp.GradScaler, Any]:
    """Six steps, of which the third has infinite gradients."""
    model = model_on(device)
    optimizer = OPTIMIZERS[name](model.parameters(), **options)
    scaler = torch.amp.GradScaler(device, **SCALER)

    def step(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() * factor
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    run = xs.compile(step) if compiled else step
    x, scales = draw(8, 4).to(device), []
    for number in range(6):
        run(x, torch.tensor(float("inf") if number == 2 else 1.0, device=device))
        scales.append(scaler.get_scale())
    return model, scales, scaler, run


@pytest.mark.parametrize(
    ("name", "way", "clip"),
    [
        ("Adam", "host", True),
        ("SGD", "fused compiled", True),
        ("Adagrad", "fused compiled", False),
    ],
)
def test_training_with_an_infinite_step_equals_the_cpu(name, way, clip):
    want, want_scales, theirs, _ = train("cpu", name, options={}, clip=clip)
    options = {"fused": True} if "fused" in way else {}
    if name == "Adagrad" and "compiled" in way and not ADAGRAD_DECIDES:
        with pytest.raises(xs.CaptureError, match=r"with torch 2\.13 Adagrad"):
            train("jax", name, options=options, compiled=True, clip=clip)
        return
    got, scales, scaler, run = train(
        "jax", name, options=options, compiled="compiled" in way, clip=clip
    )
    assert scales == want_scales == [1024, 2048, 1024, 1024, 2048, 2048]
    close(got, want)
    assert scaler.state_dict() == theirs.state_dict()
    if "compiled" in way:
        assert len(run.replays) == 1


def test_a_fused_step_reads_nothing_on_the_host():
    model = model_on("jax")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("jax", **SCALER)
    x = draw(8, 4).to("jax")
    before = metrics.counters()["transfers.device_to_host"]
    for _ in range(2):
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        xs.sync()
    assert metrics.counters()["transfers.device_to_host"] == before


def test_the_scale_follows_torchs_rules():
    scaler = torch.amp.GradScaler("jax", init_scale=8.0, growth_factor=4.0, backoff_factor=0.25)
    weight = torch.ones(2, device="jax", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaled = scaler.scale(weight.sum())
    assert scaled.item() == 16.0
    scaler.scale([weight.sum(), (weight * 2).sum()])
    scaled.backward()
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="unscale_\\(\\) has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="step\\(\\) has already been called"):
        scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0, 0.0] and scaler.get_scale() == 8.0
    scaler.update(2.0)
    assert scaler.get_scale() == 2.0


def test_an_odd_scale_divides_as_on_the_cpu():
    gradients = []
    for device in ("cpu", "jax"):
        scaler = torch.amp.GradScaler(device, init_scale=3.7)
        weight = draw(64).to(device).requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale(weight.square().sum()).backward()
        scaler.unscale_(optimizer)
        gradients.append(weight.grad.cpu())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=3e-7, atol=0)


@pytest.mark.usefixtures("x64")
def test_with_64_bit_types_torchs_own_arithmetic_runs():
    scaler = torch.amp.GradScaler("jax", init_scale=3.7)
    weight = draw(4).to("jax").requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(weight.grad.cpu(), torch.ones(4))


@pytest.mark.parametrize("bad", [float("-inf"), float("nan")])
def test_any_gradient_that_is_not_finite_skips_the_step_of_its_optimizer_only(bad):
    one, two = (torch.ones(3, device="jax", requires_grad=True) for _ in range(2))
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in (one, two)]
    scaler = torch.amp.GradScaler("jax", **SCALER)
    weights = torch.tensor([1.0, bad, 1.0], device="jax")
    scaler.scale((one * weights).sum() + two.sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert one.tolist() == [1.0] * 3 and two.tolist() == [0.0] * 3
    assert scaler.get_scale() == 512.0


def test_the_state_is_kept_and_loaded():
    scaler = torch.amp.GradScaler("jax", **SCALER)
    weight = torch.ones(2, device="jax", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    state = scaler.state_dict()
    assert state["scale"] == 1024.0 and state["_growth_tracker"] == 1
    again = torch.amp.GradScaler("jax")
    again.load_state_dict(state)
    assert again.state_dict() == state
    on_cpu = torch.amp.GradScaler("cpu")
    on_cpu.load_state_dict(state)
    assert copy.deepcopy(on_cpu).state_dict() == state
    off = torch.amp.GradScaler("jax", enabled=False)
    off.scale((weight * 2).sum()).backward()
    off.unscale_(optimizer)
    off.step(optimizer)
    off.update()
    assert off.get_scale() == 1.0 and weight.grad is not None


def test_with_autocast_in_float16():
    model = model_on("jax")
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, fused=True)
    scaler = torch.amp.GradScaler("jax")
    x = draw(16, 4).to("jax")

    @xs.compile
    def step(x):
        with torch.autocast("jax", torch.float16):
            loss = functional.mse_loss(model(x), torch.zeros(16, 3, device="jax"))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    losses = [step(x).item() for _ in range(5)]
    assert losses[-1] < 0.8 * losses[0] and scaler.get_scale() == 65536.0


def test_an_optimizer_that_asks_on_the_host_is_refused_in_a_compiled_step():
    model = model_on("jax")
    optimizer = torch.optim.RMSprop(model.parameters())
    scaler = torch.amp.GradScaler("jax")

    @xs.compile
    def step(x):
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(xs.CaptureError, match=r"decides on the host .* RMSprop.step.*fused=True"):
        step(draw(8, 4).to("jax"))
    close(model, model_on("cpu"))
    step.step(draw(8, 4).to("jax"))  # the scaler is as it was before
    assert not torch.equal(model[0].bias.cpu(), model_on("cpu")[0].bias)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert scaler.get_scale() == 65536.0


def test_a_step_refused_after_unscaling_leaves_the_scaler_as_it_was():
    models = []
    for refused in (False, True):
        model = model_on("jax")
        optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
        scaler = torch.amp.GradScaler("jax", **SCALER)
        read = []

        def step(x, model=model, optimizer=optimizer, scaler=scaler, read=read):
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            read.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        x = draw(8, 4).to("jax")
        if refused:
            with pytest.raises(xs.CaptureError, match="needs the value of a tensor"):
                xs.compile(step)(x)
        step(x)
        step(x)
        assert scaler.get_scale() == 2048.0
        models.append(model.cpu())
    close(*models)
