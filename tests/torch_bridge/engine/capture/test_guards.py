"""What a compiled step has read is guarded, and what it counts in Python is not replayed."""

from __future__ import annotations

import concurrent.futures
import sys
import types
import warnings

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.core.errors import RecompilationWarning
from isoshard.torch_bridge.engine.capture.executed_code import ExecutedCode
from isoshard.torch_bridge.engine.capture.guards import Guard, equal
from isoshard.torch_bridge.engine.capture.object_walk import ObjectWalk


def ones() -> torch.Tensor:
    return torch.ones(3, device="jax")


def test_a_number_that_changes_is_an_input_from_then_on(counted):
    trainer = types.SimpleNamespace(beta=0.0)
    step = xs.compile(lambda x: x * trainer.beta + trainer.beta**2)
    got = []
    for number in range(8):
        trainer.beta = number / 2
        got.append(step(ones())[0].item())
    assert got == [n / 2 + (n / 2) ** 2 for n in range(8)]
    assert counted("captures") == 2 and counted("calls_without_replay") == 0


def test_conditions_and_modes_keep_a_replay_each():
    trainer = types.SimpleNamespace(beta=0.0)
    step = xs.compile(lambda x: x * trainer.beta if trainer.beta > 1 else -x)
    got = []
    for beta in (0.0, 2.0, 0.0, 2.0, 3.0):
        trainer.beta = beta
        got.append(step(ones())[0].item())
    assert got == [-1.0, 2.0, -1.0, 2.0, 3.0]
    assert len(step.replays) == 3
    model = torch.nn.Dropout(1.0).to("jax")
    step = xs.compile(lambda x: model(x))
    for mode, want in ((True, 0.0), (False, 1.0), (True, 0.0), (False, 1.0)):
        model.train(mode)
        assert step(ones())[0].item() == want
    assert len(step.replays) == 2


def test_a_number_that_the_step_keeps_is_written_back():
    trainer = types.SimpleNamespace(beta=1.0)

    def decay(x):
        trainer.beta = trainer.beta * 0.5
        return x * trainer.beta

    step = xs.compile(decay)
    assert [step(ones())[0].item() for _ in range(5)] == [0.5, 0.25, 0.125, 0.0625, 0.03125]
    assert trainer.beta == 0.03125 and type(trainer.beta) is float
    assert len(step.replays) == 1


def test_a_counter_is_not_replayed_and_the_eighth_call_says_so(counted):
    trainer = types.SimpleNamespace(calls=0)

    def count(x):
        trainer.calls += 1
        return x * trainer.calls

    step = xs.compile(count)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = [step(ones())[0].item() for _ in range(10)]
    assert got == list(range(1, 11)) and trainer.calls == 10
    assert counted("calls_without_replay") == 10
    (warning,) = [one for one in caught if one.category is RecompilationWarning]
    assert "trainer.calls" in str(warning.message) and "test_guards.py" in str(warning.message)


def test_a_learning_rate_that_is_returned_is_a_number():
    weight = torch.nn.Parameter(torch.ones(2, device="jax"))
    optimizer = torch.optim.SGD([weight], lr=0.5)

    @xs.compile
    def step(x):
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        return optimizer.param_groups[0]["lr"]

    x = torch.ones(2, device="jax")
    assert [step(x), step(x)] == [0.5, 0.5]
    optimizer.param_groups[0]["lr"] = 0.25
    assert step(x) == 0.25 and type(step(x)) is float


def test_a_profiler_of_the_user_goes_on():
    seen = []

    def profile(frame, event, argument):
        seen.append(event)

    step = xs.compile(lambda x: x + 1)
    sys.setprofile(profile)
    try:
        step(ones())
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert "call" in seen


def guard_of(step):
    with ExecutedCode() as executed:
        step()
    found = ObjectWalk(executed)
    found.walk(step, "step")
    found.walk_globals(executed.codes)
    return Guard(found.sources)


def test_a_guard_compares_bits_and_tells_what_changed():
    box = types.SimpleNamespace(beta=0.0, names=["a"], table={"k": 1})
    guard = guard_of(lambda: (box.beta, box.names[0], box.table["k"]))
    assert guard.check()
    box.beta = 0.0 * 1.0
    assert guard.check(), "an equal number is no change"
    for change, back, text in (
        (lambda: setattr(box, "beta", -0.0), lambda: setattr(box, "beta", 0.0), "box.beta was 0.0"),
        (lambda: box.names.append("b"), box.names.pop, "box.names"),
        (lambda: box.table.update(k=2), lambda: box.table.update(k=1), "box.table['k'] was 1"),
    ):
        change()
        assert not guard.check()
        assert guard.change().text.startswith(text)
        back()
        assert guard.check()


class Trainer:
    def __init__(self):
        self.beta, self.count = 0.5, 0


def test_what_changes_beside_what_was_read_is_no_change_however_often():
    box = Trainer()
    guard = guard_of(lambda: box.beta)
    for number in range(20):
        box.count = number
        assert guard.check()
    for number in range(20):  # now and then
        box.count = number
        assert guard.check() and guard.check()
        box.beta = 0.25
        assert not guard.check() and guard.change().name == "box.beta"
        box.beta = 0.5
        assert guard.check()


def test_a_change_while_the_values_are_read_is_seen():
    box = Trainer()
    guard = guard_of(lambda: box.beta)
    source = next(one for one in guard.sources if one.base is vars(box))
    read = type(source).read

    class Late(type(source)):
        __slots__ = ()

        def read(self):
            found = read(self)
            box.beta = 0.75
            return found

    source.__class__ = Late
    assert guard.change() is None, "it was read before"
    source.__class__ = Late.__base__
    assert not guard.check()


def test_a_hook_is_seen_when_another_one_is_gone(counted):
    weight = torch.ones(3, device="jax", requires_grad=True)

    def step():
        weight.grad = None
        (weight * 2).sum().backward()
        return weight.grad.detach().clone()

    run = xs.compile(step)
    assert run()[0].item() == run()[0].item() == 2
    for factor in (3.0, 5.0):
        hook = weight.register_hook(lambda grad, factor=factor: grad * factor)
        assert run()[0].item() == run()[0].item() == 2 * factor
        hook.remove()
        assert run()[0].item() == run()[0].item() == 2


def test_equal():
    nan, nested = float("nan"), (1, (2.0, "x"))
    for left, right in ((1.0, 1.0), (nan, nan), (nested, (1, (2.0, "x")))):
        assert equal(left, right)
    for left, right in ((0.0, -0.0), (1, 1.0), (True, 1), (nested, (1, (2.0, "y"))), ([1], [1])):
        assert not equal(left, right)


def test_a_number_that_leads_to_a_capture_each_time_is_named():
    trainer = types.SimpleNamespace(count=0)
    step = xs.compile(lambda x: x * trainer.count)
    with pytest.warns(RecompilationWarning, match=r"test_guards.*trainer\.count was 7 and is 8"):
        for number in range(9):
            trainer.count = number
            assert step(ones())[0].item() == number
    assert len(step.replays) == 9


def test_paths_read_as_a_program_writes_them():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)).to("jax").eval()
    step = xs.compile(lambda x: model(x))
    step(ones()[None])
    names = {
        source.name(number)
        for source in step.replays[0].guards[0].sources
        for number in range(len(source.read()))
    }
    assert {"model.0.weight", "model.1.p", "model.1.training"} <= names


def test_a_number_that_is_a_symbol_here_is_a_number_in_another_thread():
    trainer = types.SimpleNamespace(beta=1.0)
    seen = []

    def read():
        return float(trainer.beta), bool(trainer.beta > 1), (ones() * trainer.beta)[0].item()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def multiply(x):
            seen[:] = [pool.submit(read).result(60), type(trainer.beta)]
            return x * trainer.beta

        step = xs.compile(multiply)
        for beta in (1.0, 2.0, 3.0):
            trainer.beta = beta
            assert step(ones())[0].item() == beta
            assert seen[0] == (beta, beta > 1, beta)


@pytest.mark.parametrize("other", [False, True])
def test_what_the_first_call_fills_in_costs_a_program_only_if_it_computes_something_else(
    other, counted
):
    class Model:
        kind = None

        def step(self, x: torch.Tensor) -> torch.Tensor:
            if self.kind is None:
                self.kind = "square"
                return x if other else x.square()
            return x.square()

    step, x = xs.compile(Model().step), torch.full((2,), 3.0, device="jax")
    assert [step(x).tolist()[0] for _ in range(3)] == [3.0 if other else 9.0, 9.0, 9.0]
    assert counted("calls_without_replay") == other
    assert other or counted("captures") == 1


def test_a_global_with_the_name_of_an_attribute_has_no_part_in_a_step(counted):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.unlike_any_other = torch.nn.Parameter(torch.ones(2, device="jax"))

        def forward(self, x):
            return (self.unlike_any_other * x).sum()

    step = xs.compile(Net())
    try:
        for number in range(4):
            globals()["unlike_any_other"] = number
            assert step(torch.full((2,), float(number), device="jax")).item() == 2 * number
    finally:
        del globals()["unlike_any_other"]
    assert counted("captures") == 1
