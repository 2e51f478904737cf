"""Gradients that a captured step leaves out: nothing is added to them without a word."""

from __future__ import annotations

import copy

import pytest
import torch

import isoshard.torch_bridge as xs


def training() -> tuple[torch.nn.Module, torch.Tensor, xs.CompiledStep]:
    """A model, and a compiled step that clears its gradients first."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(4, 3, device="jax")

    @xs.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, x, step


def trained() -> tuple[torch.nn.Module, torch.Tensor]:
    """The model after two calls."""
    model, x, step = training()
    step(x), step(x)
    assert len(step.replays) == 1
    return model, x


def test_adding_to_one_is_refused_until_gradients_are_cleared():
    model, x = trained()
    with pytest.raises(
        RuntimeError, match=r"gradient of a tensor of shape \(2,\w*.*left out.*zero_"
    ):
        model(x).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(model.weight.grad.cpu(), torch.full((2, 3), 4.0))


def test_to_python_there_is_none():
    model, x = trained()
    other = copy.deepcopy(model)
    assert all(one.grad is None for one in (*model.parameters(), *other.parameters()))
    model(x).sum().backward()
    model, _ = trained()
    assert model.to("cpu").weight.grad is None
    model, _ = trained()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_a_compiled_step_that_does_not_clear_refuses_too():
    model, x = trained()

    @xs.compile
    def adds(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="left out"):
        adds(x)
    model.zero_grad()
    adds(x), adds(x)
    assert torch.equal(model.weight.grad.cpu(), torch.full((2, 3), 8.0))


def test_gradients_that_a_step_found_are_left_out_in_every_call():
    """A backward pass outside comes before each call, so the step finds gradients to clear."""
    model, x, step = training()
    for _ in range(4):
        model.zero_grad()
        model(x).sum().backward()
        step(x)
        with pytest.raises(RuntimeError, match="left out"):
            model(x).sum().backward()
