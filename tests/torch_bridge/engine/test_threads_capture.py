"""What other threads do while one captures a step, and what they then find."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.core.errors import CaptureError

WAIT = 60.0


class Captured:
    """A step that is captured in a thread of its own, and stops in the middle until it may go on.

    Args:
        begin: what the step does before it stops.
        end: what it does then; its result is the step's.
    """

    def __init__(self, begin: Callable[[], Any], end: Callable[[], Any] = lambda: None):
        self._begin, self._end = begin, end
        self._reached, self._go_on = threading.Event(), threading.Event()
        self.step = xs.compile(self._run)
        self.result: Any = None
        self.error: BaseException | None = None

    def _run(self) -> Any:
        self._begin()
        self._reached.set()
        assert self._go_on.wait(WAIT)
        return self._end()

    @contextlib.contextmanager
    def half_way(self) -> Iterator[None]:
        """Context in which the step is being captured."""
        thread = threading.Thread(target=self._capture)
        thread.start()
        try:
            assert self._reached.wait(WAIT)
            yield
        finally:
            self._go_on.set()
            thread.join(WAIT)
            assert not thread.is_alive()

    def _capture(self) -> None:
        try:
            self.result = self.step()
        except BaseException as error:
            self.error = error
            self._reached.set()


def on_jax(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers).to("jax")


def test_another_thread_reads_writes_and_brings_values():
    weight, count, mine = on_jax(1.0, 2.0), on_jax(0.0), on_jax(3.0)
    captured = Captured(lambda: weight.mul_(2), lambda: weight.sum())
    with captured.half_way():
        for _ in range(20):
            count.add_(1)
        assert count.tolist() == [20.0]
        count.add_(1)
        assert torch.tensor([7.0]).to("jax").tolist() == [7.0]
        assert (mine + 1).item() == 4.0
        xs.sync()
        assert (weight + 1).tolist() == [2.0, 3.0]  # what memory held before the step
        assert weight[1].item() == 2.0
    assert captured.error is None
    assert captured.result.item() == 6.0
    assert count.tolist() == [21.0]
    assert weight.tolist() == [2.0, 4.0]


def test_another_thread_that_writes_what_the_step_wrote_or_read_is_not_undone():
    weight = on_jax(1.0, 2.0)
    captured = Captured(lambda: weight.mul_(2), lambda: weight.sum())
    with captured.half_way():
        weight.add_(10)
        assert weight.tolist() == [11.0, 12.0]
    assert isinstance(captured.error, CaptureError)
    assert "another thread wrote to memory" in str(captured.error)
    assert "(2,) torch.float32" in str(captured.error)
    assert weight.tolist() == [11.0, 12.0]
    captured.step()
    assert weight.tolist() == [22.0, 24.0]
    scale, weight = on_jax(3.0), on_jax(1.0)
    captured = Captured(lambda: weight.mul_(scale))
    with captured.half_way():
        scale.add_(1)
    assert isinstance(captured.error, CaptureError)
    assert (scale.tolist(), weight.tolist()) == ([4.0], [1.0])


def test_a_value_of_the_step_is_refused_to_another_thread_alone():
    weight, handed = on_jax(1.0, 2.0), []
    captured = Captured(lambda: handed.append(weight * 2), lambda: handed.clear() or weight.sum())
    with captured.half_way():
        with pytest.raises(CaptureError, match="which another thread is capturing just now"):
            handed[0].tolist()
    assert captured.error is None
    assert captured.result.item() == 3.0


def test_only_the_thread_that_captures_is_compiling():
    answers: list[bool] = []

    def ask() -> None:
        answers.append(bool(torch.compiler.is_compiling()))

    weight = on_jax(1.0)
    captured = Captured(lambda: ask() or weight.mul_(2), lambda: ask() or weight.sum())
    with captured.half_way():
        assert not torch.compiler.is_compiling()
        assert not torch.compiler.is_compiling() | False
        other = xs.compile(lambda: ask() or torch.ones_like(weight))
        other()
        ask()
    assert captured.error is None
    assert answers == [True, True, False, True]
    assert torch.compiler.is_compiling() is False


def test_an_optimizer_of_another_thread_steps_meanwhile():
    mine = on_jax(1.0).requires_grad_()
    optimizer = torch.optim.Adam([mine], lr=0.5)
    weight = on_jax(1.0, 2.0)
    captured = Captured(lambda: weight.mul_(2), lambda: weight.sum())
    with captured.half_way():
        for _ in range(3):
            mine.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert captured.error is None
    twin = torch.tensor([1.0], requires_grad=True)
    optimizer = torch.optim.Adam([twin], lr=0.5)
    for _ in range(3):
        twin.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    np.testing.assert_allclose(mine.tolist(), twin.tolist(), rtol=1e-6)


def test_numbers_drawn_by_another_thread_are_not_drawn_again():
    weight = on_jax(1.0)
    mine, both, own = (xs.Generator().manual_seed(seed) for seed in (1, 2, 3))

    def draw(generator: Any) -> torch.Tensor:
        return torch.rand(1, device="jax", generator=generator)

    expected = [draw(own).item() for _ in range(3)]
    own.manual_seed(3)
    captured = Captured(
        lambda: weight.add_(draw(both)), lambda: (weight.add_(draw(both)).clone(), draw(own))
    )
    with captured.half_way():
        seen = [draw(mine).item() for _ in range(3)] + [draw(both).item()]
    assert captured.error is None
    seen += [draw(mine).item() for _ in range(3)] + [draw(both).item()]
    results = [captured.result, captured.step(), captured.step()]
    seen += [total.item() for total, _ in results]
    assert len(set(seen)) == len(seen)
    assert [drawn.item() for _, drawn in results] == expected  # as the code would


def test_a_tensor_recorded_by_another_thread_is_used_in_a_step():
    weight, theirs = on_jax(1.0, 2.0), []
    thread = threading.Thread(target=lambda: theirs.append(on_jax(4.0, 5.0) * 2))
    thread.start()
    thread.join(WAIT)
    step = xs.compile(lambda: weight.add_(theirs[0]).clone())
    assert step().tolist() == [9.0, 12.0]
    assert step().tolist() == [17.0, 22.0]
