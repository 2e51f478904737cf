"""`xs.compile(step, repeat="auto")` computes what it computes without."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import metrics
from isoshard.torch_bridge.engine.capture.rolled_step import StackedMemory
from tests.torch_bridge.engine.capture.repeated_models import Model, Training, compare

X = torch.ones(8, 3)


def stacks(training: Training) -> list[StackedMemory]:
    """What the training step has stacked."""
    return [one for one in training.step.last.sources if isinstance(one, StackedMemory)]


def said() -> str:
    """What the metrics say of the layers."""
    lines = [line for line in metrics.report().splitlines() if line.startswith("repeat: ")]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.05, foreach=True, amsgrad=True),
    ],
    ids=["adamw", "sgd", "momentum", "foreach"],
)
def test_steps_with_a_schedule(optimizer):
    metrics.reset()
    rolled = compare(6, optimizer=optimizer)
    assert "4 layers as" in said()
    kept = len(rolled.optimizer.state_dict()["state"].get(0, {})) - 1
    assert len(stacks(rolled)) >= 6
    assert kept < 1 or len(stacks(rolled)) >= 12


def test_dropout_draws_what_it_draws_without():
    compare(4, dropout=0.3)
    assert "4 layers as" in said()


def test_autocast():
    def loss(model, x):
        with torch.autocast("jax", dtype=torch.bfloat16):
            return model(x).float().square().mean()

    plain, rolled = (Training(repeat, loss=loss) for repeat in (None, "auto"))
    want, got = plain.run(4), rolled.run(4)
    torch.testing.assert_close(got[:4], want[:4], rtol=2e-2, atol=1e-3)
    assert stacks(rolled)


def test_clipping_takes_the_norm_over_all_layers():
    compare(4, before=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    assert "4 layers as" in said()


def test_a_step_copies_no_parameters():
    rolled = Training("auto")
    x = X.to("jax")
    rolled.step(x), rolled.step(x)
    before = metrics.counters()
    for _ in range(3):
        rolled.step(x)
    after = metrics.counters()
    for name in ("repeat.stacks", "repeat.slices", "copies", "compilations", "captures"):
        assert after[name] == before[name], name
    assert after["executions"] == before["executions"] + 3


def test_evaluation_between_shares_the_stacks():
    def between(number, training):
        return training.evaluate(X.to("jax")).cpu().clone()

    rolled = compare(5, between)
    assert [one for one in rolled.evaluate.last.sources if isinstance(one, StackedMemory)]
    x = X.to("jax")
    rolled.step(x)
    before = metrics.counters()
    rolled.evaluate(x), rolled.step(x), rolled.evaluate(x)
    rolled.step(x), rolled.evaluate(x)
    after = metrics.counters()
    for name in ("repeat.stacks", "repeat.slices", "copies", "captures"):
        assert after[name] == before[name], name


def test_eager_evaluation_between():
    def between(number, training):
        with torch.no_grad():
            return training.model(X.to("jax")).cpu().clone()

    compare(4, between)


def test_state_dicts_in_the_middle():
    kept = {}

    def between(number, training):
        if number == 1:
            kept["model"] = copy.deepcopy(training.model.state_dict())
            kept["optimizer"] = copy.deepcopy(training.optimizer.state_dict())
        if number == 3:
            training.model.load_state_dict(kept["model"])
            training.optimizer.load_state_dict(kept["optimizer"])
        return [one.cpu().clone() for one in training.model.state_dict().values()]

    rolled = compare(6, between)
    assert stacks(rolled)


def test_checkpoints_in_the_middle(tmp_path):
    def between(number, training):
        path = tmp_path / ("rolled" if training.step.repeat else "plain")
        state = {"model": training.model, "optimizer": training.optimizer}
        if number == 1:
            iso.save(path, state)
        if number == 3:
            iso.restore(path, state)

    rolled = compare(6, between)
    assert stacks(rolled)


def test_a_parameter_changed_by_hand():
    def between(number, training):
        weight = training.model.layers[number % 4].up.weight
        with torch.no_grad():
            if number == 1:
                weight.mul_(1.1)
            if number == 2:
                weight.copy_(torch.ones_like(weight.cpu()) / 10)
            if number == 3:
                weight[0] = 0.5
        return weight.detach().cpu().clone()

    rolled = compare(6, between)
    assert len(rolled.step.replays) == 1


def test_a_parameter_looked_at_is_itself():
    rolled = Training("auto")
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


def test_copies_and_pickles_are_apart():
    rolled = Training("auto")
    x = X.to("jax")
    rolled.step(x)
    other = copy.deepcopy(rolled.model)
    loaded = Model(4)
    loaded.load_state_dict(pickle.loads(pickle.dumps(rolled.model.state_dict())))
    want = [one.detach().cpu().clone() for one in rolled.model.parameters()]
    rolled.step(x)
    for found in (other, loaded):
        got = [one.detach().cpu() for one in found.parameters()]
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert not torch.equal(rolled.model.layers[0].up.weight.cpu(), want[2])


def test_gradients_that_stay():
    def trained(repeat):
        torch.manual_seed(0)
        model = Model(4).to("jax")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def gather(x):
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        gather = xs.compile(gather, repeat=repeat)
        x, found = X.to("jax"), []
        for number in range(6):
            found.append(gather(x).cpu().clone())
            found += [one.grad.cpu().clone() for one in model.parameters()]
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return found

    torch.testing.assert_close(trained("auto"), trained(None), rtol=1e-4, atol=1e-6)


def test_frozen_layers_and_shared_weights():
    def place(model):
        model.to("jax")
        for layer in model.layers:
            layer.up.weight.requires_grad_(False)
            layer.norm = model.layers[0].norm

    compare(4, place=place)


def test_the_peak_is_that_of_single_layers():
    peaks = []
    for repeat in (None, "auto"):
        training = Training(repeat, layers=6)
        training.step(X.to("jax"))
        found = xs.memory_analysis(training.step)
        results = found.output_size_in_bytes - found.alias_size_in_bytes
        peaks.append((found.argument_size_in_bytes, found.alias_size_in_bytes, results))
    plain, rolled = peaks
    assert rolled[:2] == plain[:2]
    assert rolled[2] <= plain[2]


def test_two_models_of_one_step():
    def trained(repeat):
        torch.manual_seed(0)
        models = [Model(3).to("jax") for _ in range(2)]
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]

        def step(x):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = sum(one(x).square().mean() for one in models)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            return loss.detach()

        step, x = xs.compile(step, repeat=repeat), X.to("jax")
        return [step(x).cpu().clone() for _ in range(4)]

    torch.testing.assert_close(trained("auto"), trained(None), rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("repeat", ["all", 2, True, ""])
def test_other_values_are_refused(repeat):
    with pytest.raises(ValueError, match=rf'repeat={repeat!r} is not known; it is None.*"auto"'):
        xs.compile(lambda x: x, repeat=repeat)


def test_without_equal_layers_there_is_a_reason():
    metrics.reset()
    step = xs.compile(lambda x: x.sin().sum(), repeat="auto")
    x = X.to("jax")
    assert step(x).item() == pytest.approx(step(x).item())
    assert said().startswith("repeat: not rolled: ")
    assert len(step.replays) == 1


def test_host_calls_are_a_reason():
    import jax

    metrics.reset()
    shape = jax.ShapeDtypeStruct((8, 3), "float32")
    called = iso.torch_function(lambda x: jax.pure_callback(lambda y: y + 1, shape, x))
    step = xs.compile(lambda x: called(called(called(x))).sum(), repeat="auto")
    assert step(X.to("jax")).item() == 8 * 3 * 4
    assert said().startswith("repeat: not rolled: it calls Python while it runs")


def test_none_changes_nothing():
    metrics.reset()
    compiled = xs.compile(lambda x: x + 1)
    compiled(X.to("jax"))
    assert compiled.repeat is None
    assert not said()


def wide(repeat, rows, width=256):
    """Wide layers trained on few or many rows; gives losses."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(6)]
    ).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step, x = xs.compile(step, repeat=repeat), torch.ones(rows, width).to("jax")
    return [step(x).item() for _ in range(2)]


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
    wide("auto", 4096, width=768)
    assert "layers as" in said()
