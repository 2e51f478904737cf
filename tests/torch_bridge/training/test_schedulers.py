"""Learning-rate schedulers, gradient clipping and averaged models against the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from tests.torch_bridge.training.test_training import draw

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.9),
}


def train(device: str, name: str, *, compiled: bool = False) -> tuple[torch.Tensor, list[float]]:
    """Six steps of SGD with momentum, which OneCycleLR changes as well."""
    weight = torch.nn.Parameter(draw(4, 3).to(device))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x @ weight).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = xs.compile(step) if compiled else step
    x, rates = draw(8, 4, seed=1).to(device), []
    for _ in range(6):
        loss = run(x).detach()
        scheduler.step(*([loss] if name == "ReduceLROnPlateau" else []))
        rates.append(optimizer.param_groups[0]["lr"])
    return weight.detach().cpu(), rates


@pytest.mark.parametrize(
    ("name", "compiled"), [(name, number % 2 == 0) for number, name in enumerate(SCHEDULERS)]
)
def test_a_scheduled_run_equals_the_cpu(name, compiled):
    want, want_rates = train("cpu", name)
    got, rates = train("jax", name, compiled=compiled)
    assert rates == pytest.approx(want_rates)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_a_learning_rate_causes_no_compilation(counted):
    train("jax", "ExponentialLR")
    before = counted("compilations")
    train("jax", "CosineAnnealingLR")
    assert counted("compilations") == before


def test_a_schedulers_state_is_kept_and_loaded():
    weight = torch.ones(2, device="jax", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2, 0.5)
    weight.grad = torch.ones(2, device="jax")
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    again = lr_scheduler.StepLR(torch.optim.SGD([weight], lr=0.1), 2, 0.5)
    again.load_state_dict(scheduler.state_dict())
    assert again.get_last_lr() == scheduler.get_last_lr() == [0.05]


# --- Clipping ------------------------------------------------------------------------------------


def gradients(device: str) -> list[torch.nn.Parameter]:
    made = []
    for number, shape in enumerate([(4, 3), (3,), (), (2, 2, 2)]):
        parameter = torch.nn.Parameter(torch.zeros(shape, device=device))
        parameter.grad = draw(*shape, seed=number).to(device)
        made.append(parameter)
    return [*made, torch.nn.Parameter(torch.zeros(2, device=device))]  # the last has none


def compare(got: list[torch.nn.Parameter], want: list[torch.nn.Parameter]) -> None:
    for g, w in zip(got[:-1], want[:-1], strict=True):
        torch.testing.assert_close(g.grad.cpu(), w.grad, rtol=1e-5, atol=1e-7)
    assert got[-1].grad is None


def test_clip_grad_norm():
    found = []
    for norm, foreach, limit in (
        *((norm, None, 0.1) for norm in (2.0, 1.0, 3.0, 0.0, float("inf"), float("-inf"))),
        *((norm, foreach, 100.0) for norm in (2.0, float("inf")) for foreach in (False, True)),
        (2.0, False, 0.1),
    ):
        got, want = gradients("jax"), gradients("cpu")
        total = torch.nn.utils.clip_grad_norm_(got, limit, norm, foreach=foreach)
        expected = torch.nn.utils.clip_grad_norm_(want, limit, norm, foreach=foreach)
        found.append((got, want, total, expected))
    xs.sync()
    for got, want, total, expected in found:
        torch.testing.assert_close(total.cpu(), expected, rtol=1e-5, atol=1e-6)
        compare(got, want)


@pytest.mark.parametrize("foreach", [False, True])
def test_clip_grad_value_and_the_two_halves_of_clipping(foreach):
    got, want = gradients("jax"), gradients("cpu")
    for parameters in (got, want):
        torch.nn.utils.clip_grad_value_(parameters, 0.7, foreach=foreach)
        norms = [p.grad for p in parameters if p.grad is not None]
        total = torch.nn.utils.get_total_norm(norms, 2.0, foreach=foreach)
        torch.nn.utils.clip_grads_with_norm_(parameters, 0.2, total, foreach=foreach)
    compare(got, want)


def test_a_norm_that_is_not_finite_is_an_error_if_asked_for():
    parameters = gradients("jax")
    parameters[0].grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match=r"total norm of order 2.0 .* non-finite"):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("foreach", [False, True])
def test_clipping_sharded_gradients(mesh, foreach):
    got, want = gradients("jax"), gradients("cpu")
    iso.shard(got[0], mesh, P("y", None))
    got[0].grad = iso.shard(want[0].grad.clone(), mesh, P("y", None))
    total = torch.nn.utils.clip_grad_norm_(got, 0.1, foreach=foreach)
    expected = torch.nn.utils.clip_grad_norm_(want, 0.1, foreach=foreach)
    torch.testing.assert_close(total.cpu(), expected, rtol=1e-5, atol=1e-6)
    compare(got, want)


# --- Averages ------------------------------------------------------------------------------------

AVERAGES: dict[str, Callable[[torch.nn.Module], swa_utils.AveragedModel]] = {
    "stochastic": swa_utils.AveragedModel,
    "exponential": lambda m: swa_utils.AveragedModel(
        m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    ),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averaged_models(name):
    results = []
    for device in ("cpu", "jax"):
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)
        model = torch.nn.Sequential(*layers).to(device)
        average = AVERAGES[name](model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = draw(8, 4).to(device)
        for _ in range(3):
            model(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            xs.sync()
        if name == "stochastic":
            swa_utils.update_bn([x], average)
        results.append([t.detach().cpu() for t in (*average.parameters(), *average.buffers())])
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
