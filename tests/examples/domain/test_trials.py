"""The example itself, at its small size: budgets, losses, rollouts, pictures."""

import dataclasses

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import isoshard as iso
from examples.domain.__main__ import main
from examples.domain.in_jax import mean_square
from examples.domain.place import FIELD, Place
from examples.domain.problems import Data, problems
from examples.domain.runs import Run, errors
from examples.domain.trials import TRAIN, Trial, failures, meshes, trials

QUICK = problems(quick=True)
BUDGET = 2**20


class Small(torch.nn.Module):
    """A network at two resolutions, in place of the U-Net that test_networks.py has."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.last = torch.nn.Conv2d(8, 1, 1, bias=False)

    def forward(self, x):
        coarse = F.avg_pool2d(F.gelu(self.first(x)), 2)
        return x + self.last(F.interpolate(coarse, scale_factor=2.0))


def small(params, x, place):
    how = {"mesh": place.mesh, "spec": FIELD}
    fine = _gelu(iso.domain.conv(x, params["first.weight"], padding=1, **how))
    coarse = iso.domain.interpolate(iso.domain.avg_pool(fine, window=2, **how), scale=2.0, **how)
    return _added(x, iso.domain.conv(coarse, params["last.weight"], padding=0, **how))


_gelu = iso.domain.lift(lambda x: jax.nn.gelu(x, approximate=False))
_added = iso.domain.lift(jax.numpy.add)


@pytest.fixture(scope="module")
def problem():
    return dataclasses.replace(
        QUICK["flow"], module=lambda mesh: Small(), function=small, steps=4, budget=BUDGET
    )


@pytest.fixture(scope="module")
def data(problem):
    return Data.simulate(problem, trajectories=5, snapshots=4, held_out=1)


@pytest.fixture(scope="module")
def flow(problem, data):
    """One device in JAX, and unequal shards in torch."""
    one, many = meshes()
    places = {"jax": Place(one), "torch": Place(many, problem.sizes)}
    return [
        Trial(framework, place, TRAIN[framework](problem, data, place), 0.0)
        for framework, place in places.items()
    ]


def test_only_the_mesh_keeps_the_budget_and_losses_are_equal(flow, problem, data):
    begun = dataclasses.replace(flow[1].run, losses=flow[1].run.losses[:3])
    assert failures([flow[0], dataclasses.replace(flow[1], run=begun)], problem.budget) == []
    np.testing.assert_allclose(*(trial.run.losses for trial in flow), rtol=2e-3)
    told = [set(trial.run.collectives) for trial in flow]
    assert told == [set(), {"all-reduce", "collective-permute"}]
    rollouts = [trial.run.rollout(data.held_out[:, 0], 1) for trial in flow]
    for trial, fields in zip(flow, rollouts, strict=True):
        assert len(trial.run.losses) == problem.steps
        assert trial.run.losses[-1] < trial.run.losses[0]
        assert errors(fields, data.held_out[:, :2])[0] == 0
    np.testing.assert_allclose(*rollouts, atol=2e-2)


def test_the_gradient_over_uneven_shards_is_that_of_torch_in_float64():
    module = Small()
    params = {name: p.detach().numpy() for name, p in module.named_parameters()}
    x, y = np.random.default_rng(0).normal(size=(2, 4, 1, 32, 8)).astype(np.float32)
    place = Place(meshes()[1], (12, 4, 0, 16))
    spoiled = place.put(x)
    filled = jax.numpy.where(spoiled.mask(), spoiled.array, np.float32(np.nan))
    spoiled = iso.UnevenArray(filled, spoiled.shape, spoiled.sizes, spoiled.layout)
    step = jax.value_and_grad(lambda params, x, y: mean_square(small(params, x, place), y))
    loss, grads = jax.jit(step)(params, spoiled, place.put(y))
    module.double()
    wanted = F.mse_loss(module(torch.tensor(x).double()), torch.tensor(y))
    wanted.backward()
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-5)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(grads[name], parameter.grad.numpy(), atol=2e-5, err_msg=name)


def test_each_framework_tries_one_device_equal_shards_and_others(monkeypatch, problem):
    def train(problem, data, place, steps):
        return Run([1.0] * (steps or problem.steps), lambda fields: fields, 0, "")

    monkeypatch.setattr("examples.domain.trials.TRAIN", {"jax": train, "torch": train})
    found = list(trials(problem, None, ["jax", "torch"], short=2))
    assert [(t.framework, t.place.devices, t.place.sizes, len(t.run.losses)) for t in found] == [
        (framework, devices, sizes, steps)
        for framework in ("jax", "torch")
        for devices, sizes, steps in ((1, None, 2), (8, None, 2), (8, problem.sizes, 4))
    ]


def test_what_is_wrong_is_told(flow):
    assert "jax on one device takes" in failures(flow[:1], 2**40)[0]
    assert "takes" in failures(flow[1:], 1)[0]
    other = dataclasses.replace(flow[1].run, losses=[1.0])
    found = [flow[0], Trial("jax", Place(meshes()[1]), other, 0.0)]
    assert "jax on 8 devices, shards 4 equal has other losses" in failures(found, BUDGET)[0]


def test_the_command_draws_fields_and_ends_well(problem, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("examples.domain.__main__.TRAJECTORIES", 8)
    monkeypatch.setattr("examples.domain.__main__.problems", lambda quick: {"flow": problem})
    given = ["--quick", "--problem", "flow", "--framework", "torch", "--pictures", str(tmp_path)]
    ended = main(given)
    told = capsys.readouterr()
    assert ended == 0, told.err
    assert "32 x 32 points" in told.out and "budget 1 MiB on each device" in told.out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "domain_flow_fields.png",
        "domain_flow_losses.png",
    ]
    assert "does not fit" in told.out


def test_a_budget_that_is_not_kept_ends_the_command_with_1(monkeypatch, capsys):
    def one(problem, data, frameworks):
        assert frameworks == ["jax"]
        run = Run([1.0] * problem.steps, lambda fields: fields, problem.budget + 1, "")
        yield Trial("jax", Place(meshes()[1]), run, 0.0)

    monkeypatch.setattr("examples.domain.__main__.trials", one)
    assert main(["--quick", "--problem", "phases", "--framework", "jax"]) == 1
    told = capsys.readouterr()
    assert "jax on 8 devices, shards 4 equal takes 393217 bytes of 393216" in told.err
    lines = [line.strip() for line in told.out.splitlines()]
    (mine,) = [line.removeprefix("jax") for line in lines if line.startswith("jax       0")]
    (still,) = [line.removeprefix("no change") for line in lines if line.startswith("no change")]
    assert mine.split() == still.split()  # it predicts what it is given


def test_meshes():
    one, many = meshes()
    assert dict(one.shape) == {"data": 1, "space": 1}
    assert dict(many.shape) == {"data": 2, "space": 4}
