"""Gradients of compiled steps: kept inside the program, or state that lives from call to call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, make_mesh
from tests.torch_bridge.engine.capture.test_compile import batches, net

functional = torch.nn.functional
Wrap = Callable[..., Any]


def agree(train: Callable[[str, Wrap], list[float]], rtol: float = 1e-5) -> None:
    """Train on the CPU, and compiled."""
    np.testing.assert_allclose(train("jax", xs.compile), train("cpu", lambda f: f), rtol=rtol)


def _accumulate(device: str, wrap: Wrap, none: bool = True) -> Any:
    """Train with gradients of three calls added up, then one call that updates."""
    model = net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @wrap
    def backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.mse_loss(model(x), y) / 3
        loss.backward()
        return loss.detach()

    @wrap
    def update() -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=none)
        return norm.detach()

    seen = []
    for number, (x, y) in enumerate(batches(6)):
        seen.append(backward(x.to(device), y.to(device)))
        if number % 3 == 2:
            seen.append(update())
            cleared = [p.grad is None for p in model.parameters()]
            assert cleared == [none] * len(cleared)
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    return [value.item() for value in seen], state, (backward, update)


@pytest.mark.parametrize("none", [True, False], ids=["to None", "to zero"])
def test_accumulation_across_calls_gives_the_results_of_the_cpu(none):
    got = _accumulate("jax", xs.compile, none)
    want = _accumulate("cpu", lambda step: step, none)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
    for name, value in want[1].items():
        torch.testing.assert_close(got[1][name], value, rtol=1e-4, atol=1e-6, msg=name)
    backward, update = got[2]
    assert len(backward.replays) == 2  # the first of a group makes gradients, the others add
    assert len(update.replays) == 1


def test_accumulated_gradients_are_donated(counted):
    model = net().to("jax")

    @xs.compile
    def backward(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    x = batches(1)[0][0].to("jax")
    backward(x), backward(x)
    before = counted("donated_bytes")
    backward(x)
    size = 4 * sum(p.numel() for p in model.parameters())
    assert counted("donated_bytes") - before == size
    assert counted("copies") == 0


def test_micro_batches_and_two_optimizers_in_a_step():
    def train(device: str, wrap: Wrap) -> list[float]:
        model = net().to(device)
        optimizers = [
            torch.optim.SGD(model.first.parameters(), lr=0.1),
            torch.optim.AdamW(model.last.parameters(), lr=0.01),
        ]

        @wrap
        def step(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = []
            for x, y in parts:
                loss = functional.mse_loss(model(x), y) / len(parts)
                loss.backward()
                losses.append(loss.detach())
            for optimizer in optimizers:
                optimizer.step()
            return torch.stack(losses).sum()

        data = [[(x.to(device), y.to(device)) for x, y in batches(count)] for count in (2, 3, 2)]
        return [step(parts).item() for parts in data]

    agree(train)


@pytest.mark.parametrize("where", ["never", "before", "delayed"])
def test_gradients_cleared_at_other_times_give_the_results_of_the_cpu(where):
    """Outside of the step or never; or in a step that updates with the gradients of the last."""

    def train(device: str, wrap: Wrap) -> list[float]:
        model = net().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        @wrap
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if where == "delayed":
                optimizer.step()
                optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            if where != "delayed":
                optimizer.step()
            return loss.detach()

        losses = []
        for x, y in batches(4):
            if where == "before":
                optimizer.zero_grad()
            losses.append(step(x.to(device), y.to(device)).item())
            assert all(p.grad is not None for p in model.parameters())
        return losses

    agree(train)


def test_two_models_with_an_optimizer_each_train_in_turns():
    """A GAN: the generator's loss also makes gradients of the discriminator."""

    def train(device: str, wrap: Wrap) -> list[float]:
        torch.manual_seed(0)
        maker, judge = torch.nn.Linear(6, 6).to(device), torch.nn.Linear(6, 1).to(device)
        makers = torch.optim.Adam(maker.parameters(), lr=1e-2)
        judges = torch.optim.RMSprop(judge.parameters(), lr=1e-3)

        @wrap
        def train_maker(noise: torch.Tensor) -> torch.Tensor:
            makers.zero_grad()
            loss = -judge(maker(noise)).mean()
            loss.backward()
            makers.step()
            return loss.detach()

        @wrap
        def train_judge(noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
            loss = (judge(maker(noise).detach()) - judge(real)).mean() + judge.weight.square().sum()
            loss.backward()
            judges.step()
            judges.zero_grad()
            return loss.detach()

        losses = []
        for x, _ in batches(4):
            x = x.to(device)
            losses += [train_maker(x).item(), train_judge(x, x.flip(0) + 1).item()]
        return losses

    agree(train, rtol=1e-4)


def test_the_gradient_of_an_argument():
    @xs.compile
    def attack(x: torch.Tensor) -> torch.Tensor:
        x.square().sum().backward()
        return x.grad.sign()

    for value in (1.0, -2.0, 3.0):
        x = torch.full((3,), value, device="jax").requires_grad_()
        assert attack(x).tolist() == [np.sign(value)] * 3
        assert x.grad.tolist() == [2 * value] * 3
    assert attack(x).tolist() == [1.0] * 3
    assert x.grad.tolist() == [12.0] * 3
    assert len(attack.replays) == 2


def test_gradients_that_are_returned_held_and_replaced():
    model = torch.nn.Linear(3, 1).to("jax")

    @xs.compile
    def step(x: torch.Tensor) -> Any:
        model(x).sum().backward()
        return model.weight.grad, model.weight.grad[0, 1:]

    x, held = torch.ones(2, 3, device="jax"), []
    for count in (1, 2, 3):
        whole, part = step(x)
        held.append(iso.to_jax(whole))
        assert whole is model.weight.grad
        assert whole.tolist() == [[2.0 * count] * 3] and part.tolist() == [2.0 * count] * 2
    assert [array[0, 0].item() for array in held] == [2.0, 4.0, 6.0]
    whole.zero_()
    assert part.tolist() == [0.0, 0.0]
    model.weight.grad = torch.full((1, 3), 10.0, device="jax")
    assert step(x)[0].tolist() == [[12.0] * 3]
    model.weight.grad.mul_(2)
    assert step(x)[0].tolist() == [[26.0] * 3]


def test_gradients_on_a_mesh_lie_as_their_parameters():
    mesh = make_mesh((2, 4), ("x", "y"))
    model = iso.shard(torch.nn.Linear(8, 8, bias=False), mesh, P("y", None))

    @xs.compile
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    x = iso.shard(torch.ones(4, 8), mesh, P("x", None))
    for count in (1, 2, 3):
        step(x)
        assert iso.to_jax(model.weight.grad).sharding.spec == P("y")
        assert model.weight.grad[0, 0].item() == 4.0 * count
    assert len(step.replays) == 2


def test_a_result_cannot_be_differentiated_outside():
    model = net(dropout=0.5).to("jax")
    step = xs.compile(lambda x: model(x).sum())
    x = batches(1)[0][0].to("jax")
    torch.manual_seed(3)
    want = [model(x).sum().item() for _ in range(3)]
    torch.manual_seed(3)
    for number in range(3):
        loss = step(x)
        assert loss.requires_grad and loss.item() == pytest.approx(want[number], rel=1e-5)
        with pytest.raises(xs.CaptureError, match=r"graph lives inside the program.*detach"):
            (loss * 2).backward()
    assert len(step.replays) == 1
    with torch.no_grad():
        assert not step(x).requires_grad


class Marked(torch.autograd.Function):
    """Gives a CPU tensor, and saves one of the device: as torch's checkpoint before torch 2.13."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.zeros(1)

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("nobody asks for this gradient")


def test_the_graph_of_a_tensor_on_the_cpu_ends_with_the_step():
    layer = torch.nn.Linear(4, 4).to("jax")

    def step(x):
        layer.zero_grad()
        hidden = layer(x).tanh()
        assert Marked.apply(hidden).grad_fn is not None
        loss = hidden.square().mean()
        loss.backward()
        return loss.detach()

    run, x = xs.compile(step), torch.ones(2, 4, device="jax")
    want = [step(x).item(), layer.weight.grad.cpu()]
    for _ in range(3):
        assert run(x).item() == pytest.approx(want[0])
        torch.testing.assert_close(layer.weight.grad.cpu(), want[1])
    assert 0 < len(run.replays) <= 2


# --- Gradients that a step leaves out ------------------------------------------------------------


def trained() -> tuple[torch.nn.Module, torch.Tensor, xs.CompiledStep]:
    """A model, and a step that clears its gradients first, after two calls."""
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

    step(x), step(x)
    assert len(step.replays) == 1
    return model, x, step


LEFT_OUT = r"gradient of a tensor of shape \(2,\w*.*left out.*zero_"


def test_gradients_that_were_left_out_cannot_be_added_to():
    model, x, step = trained()

    @xs.compile
    def adds(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    for backward in (lambda: model(x).sum().backward(), lambda: adds(x)):
        with pytest.raises(RuntimeError, match=LEFT_OUT):
            backward()
    model.zero_grad()
    adds(x), adds(x)
    assert torch.equal(model.weight.grad.cpu(), torch.full((2, 3), 8.0))
    for _ in range(2):  # and in a step that finds gradients to clear
        model.zero_grad()
        model(x).sum().backward()
        assert torch.equal(model.weight.grad.cpu(), torch.full((2, 3), 4.0))
        step(x)
        with pytest.raises(RuntimeError, match="left out"):
            model(x).sum().backward()


def test_to_python_gradients_that_were_left_out_are_none():
    model, x, step = trained()
    other = copy.deepcopy(model)
    assert all(one.grad is None for one in (*model.parameters(), *other.parameters()))
    model(x).sum().backward()
    model.zero_grad(), step(x)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model, _, _ = trained()
    assert model.to("cpu").weight.grad is None
