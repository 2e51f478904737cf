"""`xs.compile(step, repeat="auto")` computes what it computes without."""

from __future__ import annotations

import copy
import pickle
import re

import jax
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import metrics
from isoshard.torch_bridge.engine.capture.donated_state import StackedState
from tests.torch_bridge.engine.capture.repeated_models import Model, Training, compare

X = torch.ones(8, 3)


def stacks(training: Training) -> list[StackedState]:
    """What the training step has stacked."""
    return [one for one in training.step.last.inputs if isinstance(one, StackedState)]


def said() -> str:
    """What the metrics say of the layers."""
    lines = [line for line in metrics.report().splitlines() if line.startswith("repeat: ")]
    return "\n".join(lines)


SGD = torch.optim.SGD


def test_steps_with_a_schedule():
    """Of foreach's Adam, with dropout, clipped over all layers."""
    metrics.reset()
    rolled = compare(
        3,
        optimizer=lambda parameters: torch.optim.Adam(parameters, foreach=True, amsgrad=True),
        before=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        dropout=0.3,
    )
    assert "3 layers as" in said()
    assert len(stacks(rolled)) >= 12


def test_checkpoints_in_the_middle(tmp_path):
    """And evaluations, state dicts loaded, and parameters changed by hand."""
    kept = {}

    def between(number, training):
        path, x = tmp_path / training.device, X.to(training.device)
        state = {"model": training.model, "optimizer": training.optimizer}
        weight = training.model.layers[number % 3].up.weight
        found = [training.evaluate(x).cpu().clone()]
        if number == 0:
            iso.save(path, state)
            kept.update({name: copy.deepcopy(one.state_dict()) for name, one in state.items()})
        if number == 1:
            found += [one.cpu().clone() for one in training.model.state_dict().values()]
            for name, one in state.items():
                one.load_state_dict(kept[name])
        if number == 2:
            iso.restore(path, state)
        with torch.no_grad():
            found.append(training.model(x).cpu().clone())
            if number == 3:
                weight.mul_(1.1)
                weight[0] = 0.5
            if number == 4:
                weight.copy_(torch.ones_like(weight.cpu()) / 10)
        return [*found, weight.detach().cpu().clone()]

    rolled = compare(6, between, optimizer=lambda p: SGD(p, lr=0.05, momentum=0.9))
    assert stacks(rolled)
    assert [one for one in rolled.evaluate.last.inputs if isinstance(one, StackedState)]
    assert len(rolled.step.replays) == 1


@pytest.fixture(scope="module")
def rolled():
    """Training that has begun; tests go on with it."""
    training = Training("auto")
    training.step(X.to("jax")), training.step(X.to("jax")), training.evaluate(X.to("jax"))
    return training


def test_steps_and_evaluations_share_the_stacks_and_copy_no_parameters(rolled):
    x = X.to("jax")
    rolled.step(x), rolled.evaluate(x)
    before = metrics.counters()
    for _ in range(3):
        rolled.step(x), rolled.evaluate(x)
    after = metrics.counters()
    for name in ("repeat.stacks", "repeat.slices", "copies", "compilations", "captures"):
        assert after[name] == before[name], name
    assert after["executions"] == before["executions"] + 6


def test_a_parameter_looked_at_is_itself(rolled):
    x = X.to("jax")
    weights = [layer.up.weight for layer in rolled.model.layers]
    rolled.step(x)
    now = [layer.up.weight for layer in rolled.model.layers]
    assert list(map(id, now)) == list(map(id, weights))
    before = metrics.counters()["repeat.slices"]
    held = weights[1].detach()
    was = held.cpu().clone()
    assert metrics.counters()["repeat.slices"] == before + 1
    assert (iso.to_jax(weights[1].detach()) == was.numpy()).all()
    rolled.step(x)
    assert not torch.equal(held.cpu(), was)  # it views the memory, which has new elements
    assert weights[1].grad is None


def test_copies_and_pickles_are_apart(rolled):
    x = X.to("jax")
    rolled.step(x)
    other = copy.deepcopy(rolled.model)
    loaded = Model(3)
    loaded.load_state_dict(pickle.loads(pickle.dumps(rolled.model.state_dict())))
    want = [one.detach().cpu().clone() for one in rolled.model.parameters()]
    rolled.step(x)
    for found in (other, loaded):
        got = [one.detach().cpu() for one in found.parameters()]
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert not torch.equal(rolled.model.layers[0].up.weight.cpu(), want[2])


def test_the_peak_is_that_of_single_layers(rolled):
    plain = Training(None)
    plain.step(X.to("jax"))
    peaks = []
    for training in (plain, rolled):
        found = xs.memory_analysis(training.step)
        results = found.output_size_in_bytes - found.alias_size_in_bytes
        peaks.append((found.argument_size_in_bytes, found.alias_size_in_bytes, results))
    assert peaks[1][:2] == peaks[0][:2]
    assert peaks[1][2] <= peaks[0][2]


def test_gradients_that_stay():
    def trained(device):
        torch.manual_seed(0)
        model = Model(3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def gather(x):
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        gather = xs.compile(gather, repeat="auto") if device == "jax" else gather
        x, found = X.to(device), []
        for number in range(3):
            found.append(gather(x).cpu().clone())
            found += [one.grad.cpu().clone() for one in model.parameters()]
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return found

    torch.testing.assert_close(trained("jax"), trained("cpu"), rtol=1e-4, atol=1e-6)


def test_frozen_layers_and_shared_weights():
    def place(model):
        model.to("jax")
        for layer in model.layers:
            layer.up.weight.requires_grad_(False)
            layer.norm = model.layers[0].norm

    compare(2, place=place)


def test_as_a_decorator_and_of_methods():
    class Trainer:
        def __init__(self):
            torch.manual_seed(0)
            self.model = Model(3).to("jax")

        @xs.compile(repeat="auto")
        def step(self, x):
            return self.model(x).mean()

    metrics.reset()
    one = Trainer()
    assert one.step.repeat == "auto"
    torch.testing.assert_close(one.step(X.to("jax")).cpu(), one.model(X.to("jax")).mean().cpu())
    assert "3 layers as" in said()
    metrics.reset()
    plain = xs.compile(lambda x: x + 1)
    plain(X.to("jax"))
    assert plain.repeat is None and not said()


@pytest.mark.parametrize("repeat", ["all", True])
def test_other_values_are_refused(repeat):
    with pytest.raises(ValueError, match=rf'repeat must be None.*"auto".* got {repeat!r}'):
        xs.compile(lambda x: x, repeat=repeat)


def test_reasons_not_to_take_loops():
    metrics.reset()
    step = xs.compile(lambda x: x.sin().sum(), repeat="auto")
    x = X.to("jax")
    assert step(x).item() == pytest.approx(step(x).item())
    assert said().startswith("repeat: not rolled: ")
    assert len(step.replays) == 1

    metrics.reset()
    shape = jax.ShapeDtypeStruct((8, 3), "float32")
    called = iso.torch_function(lambda x: jax.pure_callback(lambda y: y + 1, shape, x))
    step = xs.compile(lambda x: called(called(called(x))).sum(), repeat="auto")
    assert step(x).item() == 8 * 3 * 4
    assert said().startswith("repeat: not rolled: it calls Python while it runs")


def wide(repeat, rows, width=256, steps=2):
    """Wide layers trained on few or many rows; gives losses."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(3)]
    ).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step, x = xs.compile(step, repeat=repeat), torch.ones(rows, width).to("jax")
    return [step(x).item() for _ in range(steps)]


def test_loops_that_copy_too_much_are_none():
    metrics.reset()
    want = wide(None, 4)
    assert wide("auto", 4) == pytest.approx(want)
    assert re.match(
        r"repeat: not rolled: loops would copy \d+\.\d MiB a run, which takes as long as \d+% of "
        r'its flops \(at most 5%\): .*; repeat="always" takes loops anyway  \(',
        said(),
    )
    assert wide("always", 4) == pytest.approx(want)
    assert "layers as" in said()


def test_with_many_rows_the_same_loops_copy_little():
    metrics.reset()
    wide("auto", 4096, steps=1)
    assert "layers as" in said()
