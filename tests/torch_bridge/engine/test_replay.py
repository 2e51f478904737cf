"""Replays of compiled steps: no Python, fresh state, nothing taken from who holds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard import metrics
from tests.torch_bridge.engine.capture.test_compile import batches, make_step, net


def test_replays_run_no_python_of_the_model():
    model = net().to("jax")
    plain = make_step(model, torch.optim.Adam(model.parameters(), lr=0.01))

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
    assert all(p.grad is None for p in model.parameters())


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


def test_the_same_tensor_or_memory_twice_is_not_two():
    step = xs.compile(lambda a, b: a * 10 + b)
    one, two = torch.tensor([1.0]).to("jax"), torch.tensor([2.0]).to("jax")
    for _ in range(2):
        assert step(one, one).tolist() == [11]
        assert step(one, two).tolist() == [12]
        assert step(two, one).tolist() == [21]
    step = xs.compile(lambda a, b: a.mul_(10) * 0 + b)
    for _ in range(2):
        base = torch.ones(2, 3).to("jax")
        assert step(base[0], base[0]).tolist() == [10, 10, 10]
        other = torch.ones(2, 3).to("jax")
        assert step(other[0], torch.ones(2, 3).to("jax")[0]).tolist() == [1, 1, 1]
        assert other.tolist() == [[10] * 3, [1] * 3]  # a write reaches the caller


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


def test_results_stay_valid_and_aliases_of_state_are_the_state():
    state = torch.zeros(2, device="jax")

    @xs.compile
    def step(x: torch.Tensor) -> Any:
        state.add_(x)
        return state.clone(), x * 2, state.detach()

    x = torch.ones(2, device="jax")
    held = [step(x) for _ in range(4)]
    assert [copied.tolist() for copied, *_ in held] == [[n, n] for n in (1.0, 2.0, 3.0, 4.0)]
    assert [doubled.tolist() for _, doubled, _ in held] == [[2.0, 2.0]] * 4
    assert [alias.tolist() for *_, alias in held] == [[4.0, 4.0]] * 4
    state.fill_(10)
    assert step(x)[0].tolist() == [11, 11] and state.tolist() == [11, 11]


def test_program_text_and_memory_of_a_compiled_step():
    step = xs.compile(lambda x: x @ x)
    with pytest.raises(RuntimeError, match=r"not been captured yet: call it twice"):
        xs.program_text(step)
    for _ in range(2):
        step(torch.ones(4, 4, device="jax"))
    assert "dot" in xs.program_text(step)
    assert xs.memory_analysis(step).output_size_in_bytes >= 64
