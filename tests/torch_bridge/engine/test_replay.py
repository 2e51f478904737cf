"""Replays of compiled steps: no Python, fresh state, nothing taken from who holds it."""

from __future__ import annotations

import copy
import gc
from typing import Any

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import metrics
from tests.torch_bridge.engine.capture.test_compile import (
    OPTIMIZERS,
    Net,
    batches,
    make_step,
    net,
    train,
)


def test_replays_run_no_python_of_the_model():
    model = net().to("jax")
    plain = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1))

    @xs.compile
    def step(x, y):
        metrics.count("test.step")
        return plain(x, y)

    x, y = (t.to("jax") for t in batches(1)[0])
    step(x, y), step(x, y)
    done = metrics.counters()["test.step"], model.calls
    losses = [step(x, y).item() for _ in range(3)]
    assert (metrics.counters()["test.step"], model.calls) == done
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 3


def test_new_shapes_modes_and_hyperparameters_get_programs_of_their_own():
    model = net(dropout=0.5).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    step = xs.compile(make_step(model, optimizer))
    small, large = ([t.to("jax") for t in batches(1, rows)[0]] for rows in (8, 12))
    step(*small), step(*small)
    assert len(step.replays) == 1
    step(*large), step(*large)
    assert len(step.replays) == 2
    model.eval()
    assert step(*small).item() == step(*small).item()
    assert len(step.replays) == 3
    model.train()
    assert step(*small).item() != step(*small).item()
    assert len(step.replays) == 3
    optimizer.param_groups[0]["momentum"] = 0.9
    step(*small)
    assert len(step.replays) == 4
    optimizer.param_groups[0]["lr"] = 0.1
    step(*small)
    assert len(step.replays) == 4


def test_freezing_a_parameter_takes_effect():
    model = net().to("jax")
    step = xs.compile(make_step(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    x, y = (t.to("jax") for t in batches(1)[0])
    step(x, y), step(x, y)
    model.first.weight.requires_grad_(False)
    before = model.first.weight.tolist(), model.last.weight.tolist()
    step(x, y), step(x, y)
    assert model.first.weight.tolist() == before[0]
    assert model.last.weight.tolist() != before[1]


def test_nested_arguments_keywords_and_results():
    @xs.compile
    def step(inputs: dict[str, Any], scale: float = 1.0, *, extra: list[torch.Tensor]) -> Any:
        a, (b, name) = inputs["a"], inputs["b"]
        return {"sum": a + b * scale, "all": [extra[0] * 2, (a, name)], "none": None, "n": 3}

    def call(value: float, scale: float) -> Any:
        a, b = torch.full((2,), value, device="jax"), torch.ones(2, device="jax")
        got = step({"a": a, "b": (b, "label")}, scale=scale, extra=[b + 1])
        assert got["all"][1] == (a, "label") and got["all"][1][0] is a
        assert got["none"] is None and got["n"] == 3
        return got["sum"].tolist(), got["all"][0].tolist()

    for _ in range(2):
        assert call(1.0, 2.0) == ([3, 3], [4, 4])
        assert call(5.0, 2.0) == ([7, 7], [4, 4])
        assert call(5.0, 3.0) == ([8, 8], [4, 4])
    assert len(step.replays) == 2


def test_arguments_may_be_views_or_not_yet_computed():
    step = xs.compile(lambda x: (x * 2).sum())
    base = torch.arange(12.0).to("jax").reshape(3, 4)
    for _ in range(2):
        assert step(base[1]).item() == 2 * (4 + 5 + 6 + 7)
        assert step(base[2]).item() == 2 * (8 + 9 + 10 + 11)
        assert step(base.t()).item() == 2 * 66
        assert step((base + 1)[0]).item() == 2 * (1 + 2 + 3 + 4)


def test_the_same_tensor_twice_is_not_two_tensors():
    step = xs.compile(lambda a, b: a * 10 + b)
    one, two = torch.tensor([1.0]).to("jax"), torch.tensor([2.0]).to("jax")
    for _ in range(2):
        assert step(one, one).tolist() == [11]
        assert step(one, two).tolist() == [12]
        assert step(two, one).tolist() == [21]


def test_views_of_one_memory_are_not_views_of_two():
    def write_then_read(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(10)
        return b + 0

    step = xs.compile(write_then_read)
    for _ in range(2):
        base = torch.ones(2, 3).to("jax")
        assert step(base[0], base[0]).tolist() == [10, 10, 10]
        other = torch.ones(2, 3).to("jax")
        assert step(other[0], torch.ones(2, 3).to("jax")[0]).tolist() == [1, 1, 1]
        assert other.tolist() == [[10] * 3, [1] * 3]


def test_a_write_to_an_argument_reaches_the_caller():
    @xs.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        x[0].add_(5)
        return x.sum()

    for value in (1.0, 2.0, 3.0):
        x = torch.full((2, 2), value).to("jax")
        assert step(x).item() == 4 * value + 10
        assert x.tolist() == [[value + 5] * 2, [value] * 2]


def test_tensors_of_the_closure_are_read_and_written_anew():
    state = torch.zeros(3, device="jax")

    @xs.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return state * 2

    one = torch.ones(3, device="jax")
    assert [step(one)[0].item() for _ in range(3)] == [2, 4, 6]
    state.fill_(10)
    assert step(one)[0].item() == 22
    assert state.tolist() == [11, 11, 11]


def test_loading_a_checkpoint_between_replays_takes_effect():
    def run(compiled: bool) -> list[float]:
        model = net().to("jax")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = make_step(model, optimizer)
        step = xs.compile(step) if compiled else step
        data = [[t.to("jax") for t in pair] for pair in batches(4)]
        losses = [step(*data[0]), step(*data[1])]
        weights = copy.deepcopy(model.state_dict())
        state = copy.deepcopy(optimizer.state_dict())
        losses += [step(*data[2]), step(*data[3])]
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        losses += [step(*data[2]), step(*data[3])]
        return [loss.item() for loss in losses]

    compiled = run(compiled=True)
    assert compiled[2:4] == pytest.approx(compiled[4:6], rel=1e-6)
    np.testing.assert_allclose(compiled, run(compiled=False), rtol=1e-5)


def _new_data(model: Net) -> None:
    model.first.weight.data = torch.zeros(16, 6, device="jax")


def _new_parameter(model: Net) -> None:
    model.first.weight = torch.nn.Parameter(torch.zeros(16, 6, device="jax"))


def _new_module(model: Net) -> None:
    model.first = torch.nn.Linear(6, 16, device="jax")
    torch.nn.init.zeros_(model.first.weight)


def _written(model: Net) -> None:
    with torch.no_grad():
        model.first.weight.zero_()


def _loaded(model: Net) -> None:
    model.load_state_dict(model.state_dict() | {"first.weight": torch.zeros(16, 6)})


CHANGES = {f.__name__: f for f in (_new_data, _new_parameter, _new_module, _written, _loaded)}


@pytest.mark.parametrize("name", CHANGES)
def test_a_parameter_changed_between_replays_is_seen(name):
    model = net().to("jax")
    step = xs.compile(lambda x: model(x))
    x = batches(1)[0][0].to("jax")
    with torch.no_grad():
        before = [step(x).cpu() for _ in range(3)][-1]
        CHANGES[name](model)
        want = model(x).cpu()
        assert not torch.equal(before, want)
        for _ in range(2):
            torch.testing.assert_close(step(x).cpu(), want)


def test_training_goes_on_in_memory_that_replaced_a_parameters():
    model = net().to("jax")
    step = xs.compile(make_step(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    x, y = (t.to("jax") for t in batches(1)[0])
    for _ in range(3):
        step(x, y)
    _new_data(model)
    for _ in range(2):
        step(x, y)
    assert model.first.weight.count_nonzero().item() > 0


def test_plain_work_between_replays_sees_their_results_and_is_seen():
    model = net().to("jax")
    plain = net()
    step = xs.compile(make_step(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    want = make_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    x, y = batches(1)[0]
    for _ in range(4):
        step(x.to("jax"), y.to("jax")), want(x, y)
        with torch.no_grad():
            model.last.bias.mul_(0.5), plain.last.bias.mul_(0.5)
        torch.testing.assert_close(model(x.to("jax")).detach().cpu(), plain(x).detach())


HOLDERS = {
    "jax array": iso.to_jax,
    "jax arrays of the module": lambda t: iso.to_jax(t.detach()),
    "shards": lambda t: t.local_shards[0].data,
    "core shards": lambda t: iso.local_shards(t, framework="torch")[0].data,
    "cpu": lambda t: t.cpu(),
    "clone, computed": lambda t: _computed(t.clone()),
    "clone, recorded": lambda t: t.clone(),
    "copy": lambda t: torch.zeros_like(t).copy_(t),
    "sum, recorded": lambda t: t + 0,
    "deepcopy": lambda t: copy.deepcopy(t),
}


def _computed(t: torch.Tensor) -> torch.Tensor:
    xs.sync()
    return t


@pytest.mark.parametrize("name", HOLDERS)
def test_what_a_user_holds_of_a_parameter_stays_valid_across_replays(name):
    model = net().to("jax")
    step = xs.compile(make_step(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    x, y = (t.to("jax") for t in batches(1)[0])
    for _ in range(2):
        step(x, y)
    want = model.first.weight.detach().cpu().numpy()
    held = HOLDERS[name](model.first.weight.detach())
    for _ in range(3):
        step(x, y)
        gc.collect()
    np.testing.assert_array_equal(np.asarray(held), want)
    assert not np.array_equal(model.first.weight.detach().cpu(), want)


def test_results_stay_valid_across_replays():
    state = torch.zeros(2, device="jax")

    @xs.compile
    def step(x: torch.Tensor) -> Any:
        state.add_(x)
        return state.clone(), x * 2

    x = torch.ones(2, device="jax")
    held = [step(x) for _ in range(4)]
    assert [copied.tolist() for copied, _ in held] == [[n, n] for n in (1.0, 2.0, 3.0, 4.0)]
    assert [doubled.tolist() for _, doubled in held] == [[2.0, 2.0]] * 4


def test_a_returned_alias_of_state_is_the_state():
    state = torch.zeros(2, device="jax")

    @xs.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return state.detach()

    held = [step(torch.ones(2, device="jax")) for _ in range(4)]
    assert [alias.tolist() for alias in held] == [[4.0, 4.0]] * 4


def test_buffers_of_batch_norm_count_and_average():
    def run(device: str) -> Any:
        model = net(norm=True).to(device)
        step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        step = xs.compile(step) if device == "jax" else step
        for x, y in batches(5):
            step(x.to(device), y.to(device))
        return model.norm

    got, want = run("jax"), run("cpu")
    assert got.num_batches_tracked.item() == want.num_batches_tracked.item() == 5
    torch.testing.assert_close(got.running_mean.cpu(), want.running_mean)
    torch.testing.assert_close(got.running_var.cpu(), want.running_var)


def test_step_counts_of_optimizers_advance():
    model = net().to("jax")
    optimizer = torch.optim.Adam(model.parameters())
    step = xs.compile(make_step(model, optimizer))
    x, y = (t.to("jax") for t in batches(1)[0])
    for _ in range(5):
        step(x, y)
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}


def test_gradients_stay_inside():
    model = net().to("jax")
    step = xs.compile(make_step(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    x, y = (t.to("jax") for t in batches(1)[0])
    for _ in range(3):
        step(x, y)
        assert all(p.grad is None for p in model.parameters())


def test_a_step_without_gradients_or_state():
    step = xs.compile(lambda x: torch.softmax(x, -1))
    x = torch.tensor([0.0, 0.0]).to("jax")
    assert [step(x).tolist() for _ in range(3)] == [[0.5, 0.5]] * 3


def test_evaluation_under_no_grad_is_a_program_of_its_own():
    model = net().to("jax")
    step = xs.compile(lambda x: model(x).sum())
    x = batches(1)[0][0].to("jax")
    want = model(x).sum().item()
    for _ in range(2):
        with torch.no_grad():
            assert step(x).item() == pytest.approx(want, rel=1e-5)


def test_a_method_and_a_trainer_object_can_be_compiled():
    class Trainer:
        def __init__(self):
            self.model = net().to("jax")
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

        def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return make_step(self.model, self.optimizer)(x, y)

    trainer = Trainer()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, 6)
    step = xs.compile(trainer.step)
    losses = []
    for x, y in batches(6):
        losses.append(step(x.to("jax"), y.to("jax")))
        schedule.step()
    want = train("cpu", OPTIMIZERS["adamw"], schedule=True)[0]
    np.testing.assert_allclose([loss.item() for loss in losses], want, rtol=1e-4)


def test_program_text_and_memory_of_a_compiled_step():
    step = xs.compile(lambda x: x @ x)
    with pytest.raises(RuntimeError, match=r"not been captured yet: call it twice"):
        xs.program_text(step)
    for _ in range(2):
        step(torch.ones(4, 4, device="jax"))
    assert "dot" in xs.program_text(step)
    assert xs.memory_analysis(step).output_size_in_bytes >= 64
