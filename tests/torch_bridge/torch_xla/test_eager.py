"""Eager mode: every operation is a program of its own, until it is switched off."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.torch_xla.experimental.eager import (
    eager_mode,
    eager_mode_context,
    is_eager_mode,
)


@pytest.fixture(autouse=True)
def switched_off():
    yield
    eager_mode(False)


def test_each_operation_is_executed_at_once(counted):
    x = torch.ones(4).to("jax").requires_grad_()
    xs.sync()
    before = counted("executions")
    eager_mode(True)
    y = (x * 2).tanh()
    assert counted("executions") == before + 2
    assert y._storage.value.array is not None
    y.sum().backward()
    during = counted("executions")
    assert during > before + 4
    eager_mode(False)
    (y.detach() * 3 + 1).exp_()
    assert counted("executions") == during
    want = torch.ones(4, requires_grad=True)
    (want * 2).tanh().sum().backward()
    torch.testing.assert_close(x.grad.cpu(), want.grad)


def test_the_context_gives_and_restores_what_was():
    assert not is_eager_mode()
    with eager_mode_context(True) as before:
        assert (before, is_eager_mode()) == (False, True)
        with eager_mode_context(False) as inner:
            assert (inner, is_eager_mode()) == (True, False)
        assert is_eager_mode()
    with pytest.raises(ZeroDivisionError), eager_mode_context(True):
        raise ZeroDivisionError
    assert not is_eager_mode()


def test_a_compiled_step_stays_one_program(counted):
    model = torch.nn.Linear(4, 4).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @xs.compile
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(2, 4).to("jax")
    with eager_mode_context(True):
        step(x), step(x)
        before = counted("executions")
        step(x)
        assert counted("executions") == before + 1


def test_training_gives_the_same_numbers():
    def run(eager):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to("jax")
        x = torch.arange(12.0).reshape(3, 4).to("jax")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with eager_mode_context(eager):
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
        return [t.cpu() for t in (loss.detach(), *model.state_dict().values())]

    for one, two in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_the_operation_that_fails_is_the_one_that_raises():
    with eager_mode_context(True):
        x = torch.ones(2, 3, device="jax")
        with pytest.raises(RuntimeError, match="same reduction dim"):
            x @ x
        assert (x + 1).sum().item() == 12
