"""A training step in three timed parts, and a chain of additions: what recording is measured on.

Plain torch, so that peers in other environments run the very same code.

>>> stepper = Stepper(gpt2.problem(QUICK), lambda thing: thing)
>>> len(stepper.step()), min(stepper.counts()) > 50
(3, True)
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models import gpt2
from benchmarks.models.problem import Problem

PHASES = ("forward", "backward", "optimizer")
QUICK = gpt2.Size(layers=2, width=24, heads=12, vocabulary=32, length=8, batch=2)
FULL = gpt2.Size(layers=12, width=24, heads=12, vocabulary=32, length=8, batch=2)
SETTLE = 4  # steps before it counts: programs compile, caches fill
CHAIN = 500  # additions of a chain


class Stepper:
    """A training step, timed by phase.

    Args:
        problem: what to train.
        place: brings a CPU tensor, or the parameters of a module, to the device.
        state_of: an optimizer whose state is there already; this one gets one of the same shapes.
    """

    def __init__(
        self,
        problem: Problem,
        place: Callable[[Any], Any],
        state_of: torch.optim.Optimizer | None = None,
    ):
        """See the class."""
        self.problem = problem
        self.module = place(problem.module())
        self.optimizer = problem.optimizer(self.module.parameters())
        self.batch = tuple(place(tensor) for tensor in problem.tensors(0))
        if state_of is not None:
            self._take_state(state_of, place)

    def _take_state(self, other: torch.optim.Optimizer, place: Callable[[Any], Any]) -> None:
        pairs = zip(
            self.optimizer.param_groups[0]["params"],
            other.param_groups[0]["params"],
            strict=True,
        )
        for ours, theirs in pairs:
            self.optimizer.state[ours] = {
                name: part.clone() if part.device.type == "cpu" else place(part.cpu())
                for name, part in other.state[theirs].items()
            }

    def phases(self) -> tuple[Callable[[], Any], ...]:
        """The step in three parts."""

        def forward() -> None:
            self.optimizer.zero_grad()
            self.loss = self.problem.loss(self.module, *self.batch)

        def backward() -> None:
            self.loss.backward()

        def update() -> None:
            if self.problem.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.problem.max_norm)
            self.optimizer.step()
            self.loss = self.loss.detach()

        return forward, backward, update

    def step(self) -> tuple[float, ...]:
        """Run a step; seconds of each phase."""
        taken = []
        for phase in self.phases():
            started = time.perf_counter()
            phase()
            taken.append(time.perf_counter() - started)
        return tuple(taken)

    def drop(self) -> None:
        """Let go of the gradients, before what was recorded runs."""
        self.optimizer.zero_grad()

    def counts(self) -> list[int]:
        """Run a step; how many operations each phase sends to the dispatcher."""
        counts = []
        for phase in self.phases():
            with _Counter() as counter:
                phase()
            counts.append(counter.count)
        return counts


@contextlib.contextmanager
def observed(kind: type[torch.Tensor], note: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """See each operation of a tensor subclass when it ends; not those it calls itself on the way.

    Args:
        kind: a class with its own `__torch_dispatch__`.
        note: called with the operation, its positional arguments, and what it returned.
    """
    dispatch = kind.__torch_dispatch__
    inside = False

    def watched(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal inside
        if inside:
            return dispatch(func, types, args, kwargs)
        inside = True
        try:
            out = dispatch(func, types, args, kwargs)
        finally:
            inside = False
        note(func, args, out)
        return out

    setattr(kind, "__torch_dispatch__", classmethod(watched))  # noqa: B010  (typed as final)
    try:
        yield
    finally:
        setattr(kind, "__torch_dispatch__", dispatch)  # noqa: B010


def intervals(kind: type[torch.Tensor], step: Callable[[], Any]) -> list[float]:
    """Seconds of each operation of one call, from the end of the one before to its own end.

    That holds the user's Python, torch's C++ (autograd, the dispatcher) and the recording.
    """
    ends = [time.perf_counter()]
    with observed(kind, lambda *_: ends.append(time.perf_counter())):
        step()
    return [end - start for start, end in itertools.pairwise(ends)]


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def chain(x: torch.Tensor, y: torch.Tensor) -> float:
    """Seconds per operation of `CHAIN` additions, one after the other."""
    started = time.perf_counter()
    for _ in range(CHAIN):
        x = x + y
    return (time.perf_counter() - started) / CHAIN


def summary(
    steps: Sequence[Sequence[float]], counts: Sequence[int], chains: Sequence[float] = ()
) -> dict[str, Any]:
    """Medians over steps, per operation.

    Args:
        steps: of each step the seconds of its phases.
        counts: operations of each phase.
        chains: seconds per operation, as `chain` measures it.
    """
    wholes = [sum(times) for times in steps]
    by_phase = [statistics.median(times) for times in zip(*steps, strict=True)]
    results = {
        "ops": sum(counts),
        "step_ms": statistics.median(wholes) * 1e3,
        "us_per_op": statistics.median(wholes) / sum(counts) * 1e6,
        "best_us_per_op": min(wholes) / sum(counts) * 1e6,
        "phases": {
            name: {"ops": count, "us_per_op": median / count * 1e6}
            for name, count, median in zip(PHASES, counts, by_phase, strict=True)
        },
    }
    return results | chain_summary(chains)


def chain_summary(chains: Sequence[float]) -> dict[str, float]:
    """The median over chains; nothing where none was timed."""
    return {"chain_us_per_op": statistics.median(chains) * 1e6} if chains else {}
