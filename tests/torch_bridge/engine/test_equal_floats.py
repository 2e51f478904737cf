"""Lifted floats that are equal enter a program once, and each for itself when they differ."""

import copy
import threading

import jax
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.compiling.equal_floats import FEW

WIDTH, LAYERS = 4, 6  # twelve parameters of two shapes
CAUSE = "floats that were equal differ"


@pytest.fixture(autouse=True)
def _no_program_of_before():
    iso.metrics.clear_caches()


def network():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers)


def adamw(model, rates):
    """AdamW with a group for each rate."""
    parameters = list(model.parameters())
    size = len(parameters) // len(rates)
    groups = [
        {"params": parameters[n * size : (n + 1) * size], "lr": rate}
        for n, rate in enumerate(rates)
    ]
    return torch.optim.AdamW(groups, foreach=True)


def training(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def trained(rates, captured, change=None, steps=4):
    """Losses and parameters after some steps on the CPU and on the device, and what was compiled.

    Args:
        rates: of the groups.
        captured: whether the device's step is compiled.
        change: called with the number of the step and the optimizer before each step.
        steps: how many.
    """
    model = network()
    x = torch.randn(3, WIDTH)
    results = []
    for there in (copy.deepcopy(model), model.to("jax")):
        optimizer = adamw(there, rates)
        step = training(there, optimizer)
        on_device = there is model
        xs.sync()
        before = len(iso.metrics.compilations())
        run = xs.compile(step) if on_device and captured else step
        data = x.to("jax") if on_device else x
        losses = []
        for n in range(steps):
            if change is not None:
                change(n, optimizer)
            losses.append(run(data).item())
        results.append((losses, [p.detach().cpu() for p in there.parameters()]))
        compiled = iso.metrics.compilations()[before:]
    (losses, parameters), (ours, theirs) = results
    assert ours == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(theirs, parameters, rtol=1e-5, atol=1e-6)
    return [entry.cause for entry in compiled if entry.what != "0 operations"], run


@pytest.mark.parametrize("captured", [True, False])
def test_an_optimizer_is_one_program_of_few_floats(captured):
    compiled, step = trained([0.01], captured)
    assert len(compiled) == 1
    if captured:
        (replay,) = step.replays
        assert replay.plan.lifted > 2 * len(list(network().parameters()))
        assert len(replay.program.equal.firsts) < 12


@pytest.mark.parametrize("captured", [True, False])
def test_step_counts_that_differ_from_now_on(captured):
    """As after a checkpoint of which one parameter was trained for longer."""

    def change(n, optimizer):
        if n == 2:
            first = next(iter(optimizer.state.values()))
            first["step"] += 5

    compiled, step = trained([0.01], captured, change)
    assert len(compiled) == 2 and CAUSE in compiled[1]
    if captured:
        assert len(step.replays) == 1 and step.replays[0].program.equal is None


@pytest.mark.parametrize("captured", [True, False])
def test_rates_that_were_equal(captured):
    """Captured, a rate is an input of its own; lazily, one float while the groups have one rate."""

    def change(n, optimizer):
        optimizer.param_groups[0]["lr"] = 0.01 * (n + 1)

    compiled, _ = trained([0.01, 0.01], captured, change)
    assert len(compiled) == (1 if captured else 2)
    assert captured or CAUSE in compiled[1]


@pytest.mark.parametrize("captured", [True, False])
def test_rates_that_begin_at_zero(captured):
    def change(n, optimizer):
        for group, rate in zip(optimizer.param_groups, (0.01, 0.02), strict=True):
            group["lr"] = n * rate

    compiled, _ = trained([0.0, 0.0], captured, change)
    assert len(compiled) == 1


@pytest.mark.parametrize(("count", "programs"), [(FEW - 1, 1), (FEW, 2)])
def test_a_few_floats_may_be_equal_by_chance(count, programs):
    x = torch.arange(1.0, 4.0)
    there = x.to("jax")
    xs.sync()
    before = len(iso.metrics.compilations())
    for factors in ([0.5] * count, [0.5 + n for n in range(count)], [-0.5] * count):
        want = sum(x * factor for factor in factors)
        torch.testing.assert_close(sum(there * factor for factor in factors).cpu(), want)
    assert len(iso.metrics.compilations()) - before == programs


@pytest.mark.parametrize("other", [-0.0, float("nan"), 1e-320])
def test_equal_means_to_the_last_bit(other):
    """Of NaN and subnormal numbers, and of 0, whose sign a quotient shows."""
    there = torch.ones(2, device="jax")
    for factor in (0.0, other):
        factors = [factor] * FEW
        results = [there / (there * value) for value in factors]
        xs.sync()
        for result, value in zip(results, factors, strict=True):
            torch.testing.assert_close(
                result.cpu(), torch.ones(2) / (torch.ones(2) * value), equal_nan=True
            )


def test_threads_whose_floats_differ():
    """One compiled program, run by several threads: for one of them the floats differ."""
    results = {}

    def run(name, factors):
        for _ in range(20):
            x = torch.ones(3, device="jax")
            results.setdefault(name, []).append(sum(x * f for f in factors).cpu())

    equal, different = [0.75] * FEW, [0.75 + n for n in range(FEW)]
    threads = [
        threading.Thread(target=run, args=(n, different if n % 2 else equal)) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(4):
        want = torch.full((3,), float(sum(different if n % 2 else equal)))
        assert len(results[n]) == 20
        for got in results[n]:
            torch.testing.assert_close(got, want)


def test_a_nan_is_named_where_floats_are_one_input():
    jax.config.update("jax_debug_nans", True)
    try:
        x = torch.zeros(3, device="jax")
        parts = [x * 0.5 for _ in range(FEW)]
        with pytest.raises(FloatingPointError) as error:
            (sum(parts) / x).cpu()
    finally:
        jax.config.update("jax_debug_nans", False)
    assert "div" in "".join(error.value.__notes__)
