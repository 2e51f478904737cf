"""The example itself, at its small size: budgets, losses, rollouts, pictures."""

import dataclasses

import numpy as np
import pytest

from examples.domain.__main__ import main
from examples.domain.place import Place
from examples.domain.problems import Data, problems
from examples.domain.runs import Run, errors
from examples.domain.trials import Trial, meshes, trials, verdict

QUICK = problems(quick=True)


@pytest.fixture(scope="module")
def data():
    return Data.simulate(QUICK["flow"], trajectories=8, snapshots=5, held_out=2)


@pytest.fixture(scope="module")
def flow(data):
    return list(trials(QUICK["flow"], data, ["jax", "torch"], short=2))


def test_only_the_mesh_keeps_the_budget_and_losses_are_equal(flow):
    assert verdict(flow, QUICK["flow"].budget) == []
    assert [(t.framework, t.place.devices, t.place.sizes) for t in flow] == [
        ("jax", 1, None),
        ("jax", 8, None),
        ("jax", 8, QUICK["flow"].sizes),
        ("torch", 1, None),
        ("torch", 8, None),
        ("torch", 8, QUICK["flow"].sizes),
    ]
    jax, torch = (trial.run.losses for trial in (flow[2], flow[5]))
    np.testing.assert_allclose(jax, torch, rtol=2e-3)
    assert len(jax) == QUICK["flow"].steps


def test_what_is_sent(flow):
    told = [set(trial.run.collectives) for trial in flow]
    assert told[0] == told[3] == set()
    assert told[1] == told[2] == told[5] == {"all-reduce", "collective-permute"}
    assert told[4] <= {"all-reduce", "collective-permute", "all-gather"}  # of pooling


def test_the_loss_falls_and_rollouts_agree(flow, data):
    trained = [flow[2], flow[5]]
    rollouts = [trial.run.rollout(data.held_out[:, 0], 2) for trial in trained]
    for trial, fields in zip(trained, rollouts, strict=True):
        assert trial.run.losses[-1] < 0.7 * trial.run.losses[0]
        assert errors(fields, data.held_out[:, :3])[0] == 0
    np.testing.assert_allclose(*rollouts, atol=2e-2)


def test_what_is_wrong_is_told(flow):
    assert "jax on one device takes" in verdict(flow[:1], 2**40)[0]
    assert "takes" in verdict(flow[1:2], 1)[0]
    other = dataclasses.replace(flow[1].run, losses=[1.0])
    found = [flow[0], dataclasses.replace(flow[1], run=other)]
    assert "jax on 8 devices, shards 4 equal has other losses" in verdict(found, 4 * 2**20)[0]


def test_the_command_draws_fields_and_ends_well(tmp_path, capsys):
    ended = main(["--quick", "--problem", "phases", "--pictures", str(tmp_path)])
    told = capsys.readouterr()
    assert ended == 0, told.err
    assert "16 x 8 x 8 points" in told.out and "budget 0.375 MiB on each device" in told.out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "domain_phases_fields.png",
        "domain_phases_losses.png",
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
