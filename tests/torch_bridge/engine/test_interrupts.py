"""Ctrl-C in the middle of a step: model and optimizer are as before it, or as after it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.compiling import program


@pytest.fixture(autouse=True)
def interrupts_raise() -> Iterator[None]:
    """A shell that starts tests in the background lets them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def training(compiled: bool) -> tuple[Callable[[], None], Callable[[], list[torch.Tensor]]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.ones(4, 3, device="jax")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        if not compiled:
            xs.sync()

    def state() -> list[torch.Tensor]:
        kept = [value for one in optimizer.state.values() for value in one.values()]
        return [one.detach().cpu().clone() for one in (*model.parameters(), *kept)]

    return xs.compile(step) if compiled else step, state


@pytest.mark.parametrize("compiled", [True, False])
def test_an_interrupt_while_a_program_runs_waits_for_its_results(compiled, monkeypatch):
    step, state = training(compiled)
    theirs, wanted = training(compiled)
    step(), step(), theirs(), theirs(), theirs()
    monkeypatch.setattr(
        program, "WATCHING", [lambda *_: signal.raise_signal(signal.SIGINT)]
    )  # after the donated inputs are gone, before the results are stored
    with pytest.raises(KeyboardInterrupt):
        step()
    monkeypatch.undo()
    assert all(map(torch.equal, state(), wanted()))


def test_an_interrupt_while_a_step_is_captured_leaves_everything_as_it_was():
    step, state = training(compiled=True)
    step()
    before = state()
    interrupt = [True]

    @xs.compile
    def another() -> None:
        step.step()
        if interrupt:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        another()
    assert all(map(torch.equal, state(), before))
    interrupt.clear()
    another()
    assert not all(map(torch.equal, state(), before))


def test_a_handler_of_the_user_is_called_once_and_stays():
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with program.Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            with program.Uninterrupted():
                pass
            assert not calls
        assert calls == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        assert len(calls) == 2
    finally:
        signal.signal(signal.SIGINT, before)
