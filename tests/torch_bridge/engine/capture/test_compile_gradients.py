"""Gradients of compiled steps: kept inside the program, or state that lives from call to call."""

from __future__ import annotations

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


def _accumulate(device: str, wrap: Callable[..., Any], none: bool = True, **options: Any) -> Any:
    """Train with gradients of three calls added up, then one call that updates."""
    model = net(**options).to(device)
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
    for number, (x, y) in enumerate(batches(9)):
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


def test_gradients_in_the_step_are_computed_by_both_kinds_of_micro_batches():
    def train(device: str, wrap: Callable[..., Any]) -> list[float]:
        model = net().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @wrap
        def step(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
            optimizer.zero_grad()
            losses = []
            for x, y in parts:
                loss = functional.mse_loss(model(x), y) / len(parts)
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            return torch.stack(losses).sum()

        data = [[(x.to(device), y.to(device)) for x, y in batches(count)] for count in (2, 3, 2)]
        return [step(parts).item() for parts in data]

    np.testing.assert_allclose(train("jax", xs.compile), train("cpu", lambda f: f), rtol=1e-5)


def test_gradients_nobody_clears_add_up_as_they_do_without_compile():
    def train(device: str, wrap: Callable[..., Any]) -> list[float]:
        model = net().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        @wrap
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return [step(x.to(device), y.to(device)).item() for x, y in batches(5)]

    np.testing.assert_allclose(train("jax", xs.compile), train("cpu", lambda f: f), rtol=1e-5)


@pytest.mark.parametrize("where", ["before", "after"])
def test_clearing_gradients_outside_gives_the_results_of_the_cpu(where):
    def train(device: str, wrap: Callable[..., Any]) -> list[float]:
        model = net().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        @wrap
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = []
        for x, y in batches(5):
            if where == "before":
                optimizer.zero_grad()
            losses.append(step(x.to(device), y.to(device)).item())
            assert all(p.grad is not None for p in model.parameters())
            if where == "after":
                optimizer.zero_grad()
        return losses

    np.testing.assert_allclose(train("jax", xs.compile), train("cpu", lambda f: f), rtol=1e-5)


def test_an_update_delayed_by_one_call_is_not_lost():
    def train(device: str, wrap: Callable[..., Any]) -> list[float]:
        model = net().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @wrap
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.step()
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss.detach()

        return [step(x.to(device), y.to(device)).item() for x, y in batches(5)]

    np.testing.assert_allclose(train("jax", xs.compile), train("cpu", lambda f: f), rtol=1e-5)


def test_two_models_with_an_optimizer_each_train_in_turns():
    """A GAN: the generator's loss also makes gradients of the discriminator."""

    def train(device: str, wrap: Callable[..., Any]) -> list[float]:
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
        for x, _ in batches(5):
            x = x.to(device)
            losses += [train_maker(x).item(), train_judge(x, x.flip(0) + 1).item()]
        return losses

    np.testing.assert_allclose(train("jax", xs.compile), train("cpu", lambda f: f), rtol=1e-4)


def test_both_models_in_one_step():
    def train(device: str, wrap: Callable[..., Any]) -> list[float]:
        torch.manual_seed(0)
        first, second = torch.nn.Linear(6, 6).to(device), torch.nn.Linear(6, 4).to(device)
        optimizers = [
            torch.optim.SGD(first.parameters(), lr=0.1),
            torch.optim.AdamW(second.parameters(), lr=0.01),
        ]

        @wrap
        def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = functional.mse_loss(second(first(x)), y)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            return {"loss": loss.detach()}

        return [step(x.to(device), y.to(device))["loss"].item() for x, y in batches(5)]

    np.testing.assert_allclose(train("jax", xs.compile), train("cpu", lambda f: f), rtol=1e-5)


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


def test_a_returned_gradient_is_the_gradient():
    model = torch.nn.Linear(3, 1).to("jax")

    @xs.compile
    def step(x: torch.Tensor) -> Any:
        model(x).sum().backward()
        return model.weight.grad, model.weight.grad[0, 1:]

    x = torch.ones(2, 3, device="jax")
    for count in (1, 2, 3):
        whole, part = step(x)
        assert whole is model.weight.grad
        assert whole.tolist() == [[2.0 * count] * 3] and part.tolist() == [2.0 * count] * 2
    whole.zero_()
    assert part.tolist() == [0.0, 0.0]


def test_held_gradients_stay_valid_when_the_next_call_adds_to_them():
    model = torch.nn.Linear(3, 1).to("jax")

    @xs.compile
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    x = torch.ones(2, 3, device="jax")
    held = []
    for _ in range(4):
        step(x)
        held.append(iso.to_jax(model.weight.grad))
    assert [array[0, 0].item() for array in held] == [2.0, 4.0, 6.0, 8.0]


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


def test_a_gradient_replaced_by_the_user_is_seen():
    model = torch.nn.Linear(3, 1, bias=False).to("jax")

    @xs.compile
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    x = torch.ones(2, 3, device="jax")
    step(x), step(x)
    model.weight.grad = torch.full((1, 3), 10.0, device="jax")
    step(x)
    assert model.weight.grad.tolist() == [[12.0] * 3]
    model.weight.grad.mul_(2)
    step(x)
    assert model.weight.grad.tolist() == [[26.0] * 3]


def test_a_result_cannot_be_differentiated_outside():
    model = net().to("jax")
    step = xs.compile(lambda x: model(x).sum())
    x = batches(1)[0][0].to("jax")
    for _ in range(2):
        loss = step(x)
        assert loss.requires_grad
        with pytest.raises(xs.CaptureError, match=r"graph lives inside the program.*detach"):
            (loss * 2).backward()
    with torch.no_grad():
        assert not step(x).requires_grad


def test_a_forward_pass_with_gradients_on_is_one_program():
    model = net(dropout=0.5).to("jax")
    step = xs.compile(lambda x: model(x))
    x = batches(1)[0][0].to("jax")
    torch.manual_seed(3)
    want = [model(x).tolist() for _ in range(3)]
    torch.manual_seed(3)
    np.testing.assert_allclose([step(x).tolist() for _ in range(3)], want, rtol=1e-5)
    assert len(step.replays) == 1


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
