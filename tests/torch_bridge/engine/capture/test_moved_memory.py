"""Memory that a captured step took on one device and that lies on a mesh in the next call."""

from __future__ import annotations

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.core.runtime import metrics


@pytest.fixture
def mesh():
    return iso.make_mesh((8,), ("x",))


def _shared(tensor, new, mesh):
    tensor.copy_(iso.shard(new.to("jax"), mesh, P("x")))


def _recorded(tensor, new, mesh):
    tensor.copy_(iso.shard(new.to("jax"), mesh, P("x")) * 2 / 2)


def _into_rows(tensor, new, mesh):
    tensor[:8].copy_(iso.shard(new[:8].to("jax"), mesh, P("x")))
    tensor[8:].copy_(new[8:])


@pytest.mark.parametrize("move", [_shared, _recorded, _into_rows])
def test_a_weight_that_is_only_read(move, mesh):
    weight = torch.randn(16, 4).to("jax")
    step = xs.compile(lambda x: x @ weight)
    x, new = torch.randn(2, 16), torch.randn(16, 4)
    given = x.to("jax")
    step(given)
    step(given)
    move(weight, new, mesh)
    captures = []
    for _ in range(4):
        torch.testing.assert_close(step(given).cpu(), x @ new)
        captures.append(metrics.counters()["captures"])
    assert captures[1:] == [captures[1]] * 3  # the first took the argument to the mesh


@pytest.mark.parametrize("move", [_recorded, _into_rows])
def test_a_weight_that_is_trained(move, mesh):
    torch.manual_seed(0)
    start, new = torch.randn(16, 4), torch.randn(16, 4)
    batches = torch.randn(4, 2, 16)
    found = []
    for device in ("cpu", "jax"):
        weight = torch.nn.Parameter(start.to(device, copy=True))
        optimizer = torch.optim.AdamW([weight], lr=0.1)

        def step(x, weight=weight, optimizer=optimizer):
            optimizer.zero_grad()
            loss = ((x @ weight) ** 2).mean()
            loss.backward()
            optimizer.step()
            return loss

        step = step if device == "cpu" else xs.compile(step)
        losses = []
        for number, batch in enumerate(batches):
            if number == 2:
                with torch.no_grad():
                    weight.copy_(new) if device == "cpu" else move(weight, new, mesh)
            losses.append(step(batch.to(device)).detach().cpu())
        steps = optimizer.state[weight]["step"]
        found.append((torch.stack(losses), weight.detach().cpu(), steps.cpu()))
    torch.testing.assert_close(found[1], found[0])


def test_an_argument_whose_layout_is_known_once_it_is_computed(mesh):
    weight, given = torch.randn(8, 4).to("jax"), torch.randn(8, 8)
    step = xs.compile(lambda x: x @ weight)
    for number in range(1, 5):
        x = given.to("jax") if number < 3 else iso.shard(given.to("jax"), mesh, P("x"))
        torch.testing.assert_close(step(x * number).cpu(), given * number @ weight.cpu())


def test_a_gradient_whose_layout_is_known_once_it_is_computed(mesh):
    weight = torch.nn.Parameter(torch.ones(8, 4).to("jax"))

    @xs.compile
    def step(x):
        (x @ weight).sum().backward()

    x = torch.ones(2, 8).to("jax")
    for _ in range(3):
        step(x)
    weight.grad = iso.shard(torch.ones(8, 4).to("jax"), mesh, P("x")) * 2
    for number in range(1, 4):
        step(x)
        torch.testing.assert_close(weight.grad.cpu(), torch.full((8, 4), 2.0 + 2 * number))


def test_a_step_that_lays_out_what_it_writes(mesh):
    total = torch.zeros(16, 4).to("jax")

    @xs.compile
    def step(x):
        total.copy_(iso.shard(total + x, mesh, P("x")))

    for number in range(1, 5):
        step(torch.ones(16, 4).to("jax"))
        torch.testing.assert_close(total.cpu(), torch.full((16, 4), float(number)))
