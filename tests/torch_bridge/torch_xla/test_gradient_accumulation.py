"""`gradient_accumulation`: the gradients of the Python loop over batches, as one entry."""

from __future__ import annotations

import copy

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.torch_xla.experimental.gradient_accumulation import (
    gradient_accumulation,
)

functional = torch.nn.functional


def by_hand(step, batches, model, *carried):
    total = 0.0
    for batch in zip(*batches, strict=True):
        result = step(*batch, *carried)
        loss, *carried = result if isinstance(result, tuple) else (result,)
        loss = loss / len(batches[0])
        loss.backward()
        total = total + loss.detach()
    return (total, *carried) if carried else total


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU(), torch.nn.Linear(8, 3)
    ).double()


def data(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_loss_gradients_buffers_and_carried_tensors(x64):
    x, y = data(5, 6, 4), torch.arange(30).reshape(5, 6) % 3

    def run(loop, device):
        model = build().to(device)
        model[0].bias.requires_grad_(False)
        carried = [t.to(device) for t in (torch.tensor(10), torch.ones(2), torch.zeros(3))]

        def step(x, y, count, doubled, summed):
            loss = functional.cross_entropy(model(x), y) * 2
            return loss, count + 10, doubled * 2, summed + 1

        for _ in range(2):  # the second time gradients are there already
            loss, *carried = loop(step, (x.to(device), y.to(device)), model, *carried)
        assert model[0].bias.grad is None
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [t.detach().cpu() for t in (loss, *carried, *gradients, *model.buffers())]

    got, want = run(gradient_accumulation, "jax"), run(by_hand, "cpu")
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_one_program_for_any_number_of_batches(counted):
    model, x = build().float().to("jax"), data(16, 6, 4).float().to("jax")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    xs.sync()
    losses, compilations, calls = [], [], []
    for _ in range(4):

        def step(x):
            calls.append(1)
            return model(x).square().mean()

        optimizer.zero_grad()
        losses.append(gradient_accumulation(step, (x,), model))
        entries = len([e for e in tapes.recorder().program if isinstance(e[0], int)])
        optimizer.step()
        xs.sync()
        compilations.append(counted("compilations"))
        assert entries < 20
    assert len(calls) == 4
    assert compilations[1:] == [compilations[1]] * 3
    values = [loss.item() for loss in losses]
    assert values == sorted(values, reverse=True)
    assert isinstance(losses[0], torch.Tensor)
    assert not losses[0].requires_grad


def test_random_numbers_differ_between_batches():
    model = torch.nn.Linear(1, 1, bias=False).to("jax")
    x = torch.ones(8, 64, 1, device="jax")
    seen = torch.zeros(8, 64, device="jax")
    place = torch.tensor(0).to("jax")

    def step(x, seen, place):
        dropped = functional.dropout(x, 0.5)
        rows = torch.arange(8, device="jax")[:, None] == place
        return model(dropped).mean(), torch.where(rows, dropped[:, 0], seen), place + 1

    _, seen, _ = gradient_accumulation(step, (x,), model, seen, place)
    assert len({tuple(row) for row in seen.tolist()}) == 8
    torch.testing.assert_close(model.weight.grad.cpu(), seen.mean().reshape(1, 1).cpu())


def test_sharded_parameters_get_sharded_gradients(mesh):
    model = torch.nn.Linear(8, 8).to("jax")
    xs.mark_sharding(model.weight, mesh, ("y", None))
    x = xs.mark_sharding(torch.ones(3, 4, 8).to("jax"), mesh, (None, "x", None))
    gradient_accumulation(lambda x: model(x).sum(), (x,), model)
    assert model.weight.grad.sharding_spec == model.weight.sharding_spec
    torch.testing.assert_close(model.weight.grad.cpu(), torch.full((8, 8), 4.0))


def test_hooks_of_parameters_are_called():
    model, seen = torch.nn.Linear(2, 1).to("jax"), []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
    gradient_accumulation(lambda x: model(x).sum(), (torch.ones(3, 4, 2, device="jax"),), model)
    assert seen == [[[4, 4]]]


def test_in_a_compiled_step():
    model = build().float().to("jax")
    reference = copy.deepcopy(model)

    def make(model):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)

        def step(x):
            optimizer.zero_grad()
            loss = gradient_accumulation(lambda x: model(x).square().mean(), (x,), model)
            optimizer.step()
            return loss

        return step

    compiled, plain, x = xs.compile(make(model)), make(reference), data(4, 6, 4).float().to("jax")
    for _ in range(3):
        assert compiled(x).item() == pytest.approx(plain(x).item(), rel=1e-5)


def test_mistakes():
    model, x = torch.nn.Linear(2, 1).to("jax"), torch.ones(3, 4, 2, device="jax")
    step = lambda x: model(x).sum()  # noqa: E731
    with pytest.raises(ValueError, match="at least one tensor"):
        gradient_accumulation(step, (), model)
    with pytest.raises(ValueError, match=r"batches\[1\] is no tensor, but list"):
        gradient_accumulation(step, (x, [1]), model)
    with pytest.raises(ValueError, match=r"batches\[0\] of shape \(0, 2\) is empty"):
        gradient_accumulation(step, (torch.ones(0, 2, device="jax"),), model)
    with pytest.raises(ValueError, match=r"have different lengths: \[3, 2\]"):
        gradient_accumulation(step, (x, x[:2]), model)
    with pytest.raises(ValueError, match=r"carried\[0\] is on cpu"):
        gradient_accumulation(step, (x,), model, torch.ones(1))
    with pytest.raises(ValueError, match="must return a loss of one element"):
        gradient_accumulation(lambda x: model(x), (x,), model)
    with pytest.raises(ValueError, match="returned 0 besides the loss"):
        gradient_accumulation(lambda x, c: model(x).sum(), (x,), model, x[0])
    with pytest.raises(TypeError, match=r"carried\[0\] is \(4, 2\) .*, the new one \(2,\)"):
        gradient_accumulation(lambda x, c: (model(x).sum(), c[0]), (x,), model, x[0])
    with pytest.raises(ValueError, match="does not depend on a parameter of the model"):
        gradient_accumulation(lambda x: x.sum(), (x,), model)
