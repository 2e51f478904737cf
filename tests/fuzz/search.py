"""Finding programs that differ, and making them small.

A program is a function of bytes: hypothesis reads the choices of a `Builder` from them. Many
programs are recorded on one tape and compiled at once, since compiling is what takes time. One that
differs is run again by itself; if it still differs, hypothesis shrinks it for a while, and then
`smaller` takes out what hypothesis could not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import time
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase

import isoshard.torch_bridge as xs

from . import compare, noise
from .builder import Builder, Unfit
from .layouts import LayoutBuilder
from .operations import CHOICES, finish
from .program import Fact, Program, Run
from .smaller import smallest

BATCH = 24
BYTES = 6000
STEPS = 9
SECONDS = 15
"""How long hypothesis may shrink a program, and how long `smaller` may afterwards."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A program on which the devices differ.

    Attributes:
        number: of the program, in the run with this seed.
        seed: see `number`.
        program: as small as it could be made.
        what: the differences.
    """

    number: int
    seed: int
    program: Program
    what: str


class Difference(AssertionError):
    """A program differs; raised inside hypothesis."""


class _Enough(BaseException):
    """Time is up; no `Exception`, which hypothesis would take for a difference."""


@st.composite
def programs(
    draw: Any, *, mesh: tuple[int, ...] = (), uneven: bool = False, layouts: bool = False
) -> Program:
    """Random programs."""
    kind = draw(st.integers(0, 2))
    make = LayoutBuilder if layouts else Builder
    b = make(draw, mesh=mesh, gradients=kind == 2, uneven=uneven)
    for _ in range(b.integer(1, 3)):
        _start(b)
    for _ in range(b.integer(1, STEPS)):
        try:
            b.one(b.one(CHOICES))(b)
            b.after()
        except Unfit:
            continue
    if b.gradients:
        finish(b)
    return b.program()


def _start(b: Builder) -> None:
    import torch

    made = b.fresh(b.shape(), torch.float32 if b.gradients and b.chance(70) else None)
    differentiable = "float" in made or "complex" in made
    b.bind(f"{made}.requires_grad_()" if b.gradients and differentiable else made)


def check(program: Program) -> list[str]:
    """Run one program on both devices; what differs."""
    try:
        got = record(program)
    except Exception as error:
        return [f"computing it raises {type(error).__name__}: {error}"]
    return verdict(program, program.run("cpu"), got) or _together(program, got)


def _together(program: Program, got: Run) -> list[str]:
    """What 16-bit floats are in one program and not where each line is a program of its own.

    On a mesh the partitioner may add up in another order, which is rounding.
    """
    facts = got.facts.items()
    halves = [name for name, fact in facts if fact.tensor is not None and _half(fact.tensor)]
    if not halves or got.fault is not None or "mark(" in str(program):
        return []
    apart = program.run("jax", between=xs.sync).facts
    return [
        f"{name}: another value than where each line is computed by itself"
        for name in halves
        if name in apart and not compare.same(_down(got.facts[name]), _down(apart[name]))
    ]


def _half(tensor: Any) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize == 2


def record(program: Program) -> Run:
    """Run a program on the `jax` device without computing anything that it does not ask for."""
    return program.run("jax")


def verdict(program: Program, want: Run, got: Run) -> list[str]:
    """What differs between a run on the CPU and one on the `jax` device.

    Nothing is said of a program that does not repeat itself on the CPU: looking at `requires_grad`
    while it was written made torch bring its graph up to date, and changed what came after.
    """
    if want.fault is not None:
        return []
    if got.fault is not None:
        return [] if noise.refuses(program, got.fault) else [got.fault]
    try:
        host = {name: _down(fact) for name, fact in got.facts.items()}
    except Exception as error:
        return [f"computing it raises {type(error).__name__}: {error}"]
    return compare.differences(program, want.facts, host)


def _down(fact: Fact) -> Fact:
    return fact if fact.tensor is None else Fact(fact.tensor.cpu(), fact.shown)


class Search:
    """Runs programs by number.

    Args:
        seed: another seed, other programs.
        mesh: lay their tensors out on a mesh of this shape; on one device where it is ().
        uneven: in blocks of any sizes.
        layouts: each on a mesh of its own, with results marked too; see `layouts`.
    """

    def __init__(
        self,
        seed: int,
        *,
        mesh: tuple[int, ...] = (),
        uneven: bool = False,
        layouts: bool = False,
    ):
        """See the class."""
        self.seed = seed
        self._programs = programs(mesh=mesh, uneven=uneven, layouts=layouts)
        self._name = "layouts" if layouts else f"{mesh} uneven" if uneven else f"{mesh}"
        self._alone = layouts
        self._made: list[Program] = []

        @self._settings()
        @hypothesis.given(self._programs)
        def collect(program: Program) -> None:
            self._made.append(program)

        self._collect: Any = collect

    @staticmethod
    def _settings() -> settings:
        return settings(
            database=InMemoryExampleDatabase(),
            phases=(Phase.reuse, Phase.shrink),
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        )

    def program(self, number: int) -> Program | None:
        """The program of a number; None if its choices ran out of bytes."""
        self._made.clear()
        self._collect.hypothesis.fuzz_one_input(self._bytes(number))
        return self._made[0] if self._made else None

    def _bytes(self, number: int) -> bytes:
        return random.Random(f"{self.seed}/{self._name}/{number}").randbytes(BYTES)

    def batch(self, numbers: range) -> list[int]:
        """Run programs together; the numbers of those that differ."""
        made = {n: program for n in numbers if (program := self.program(n)) is not None}
        if self._alone:  # meshes that number the devices differently do not meet on one tape
            return [n for n, program in made.items() if check(program)]
        try:
            recorded = {n: record(program) for n, program in made.items()}
            xs.sync()
        except Exception:  # one of them cannot be computed: look at each by itself
            return [n for n, program in made.items() if check(program)]
        suspects = [
            n
            for n, p in made.items()
            if verdict(p, p.run("cpu"), recorded[n]) or _together(p, recorded[n])
        ]
        return [n for n in suspects if check(made[n])] or suspects

    def shrink(self, number: int) -> Fault:
        """Make a program that differs as small as can be in about half a minute."""
        small: Program | None = None
        until = math.inf

        @self._settings()
        @hypothesis.seed(self.seed)
        @hypothesis.given(self._programs)
        def examine(program: Program) -> None:
            nonlocal small
            if time.monotonic() > until:
                raise _Enough
            if check(program):
                if small is None or _size(program) <= _size(small):
                    small = program
                raise Difference

        with contextlib.suppress(Difference):
            examine.hypothesis.fuzz_one_input(self._bytes(number))
        if small is None:  # it differs in the company of others only
            whole = self.program(number)
            return Fault(number, self.seed, whole, "it differs in a batch, not alone")
        until = time.monotonic() + SECONDS
        with contextlib.suppress(Difference, _Enough):
            examine()  # begins with what just failed, which is in its database
        return self._fault(number, small, SECONDS)

    def fault(self, number: int) -> Fault:
        """A program that differs, made smaller for some seconds only."""
        return self._fault(number, self.program(number), SECONDS / 5)

    def _fault(self, number: int, program: Program, seconds: float) -> Fault:
        program = smallest(program, lambda smaller: bool(check(smaller)), seconds)
        found = "\n".join(check(program)) or "it differs in a batch, not alone"
        return Fault(number, self.seed, program, found)


def _size(program: Program) -> tuple[int, int]:
    return len(program.lines), len(str(program))


def run(
    search: Search, numbers: range, *, shrink: int = 3, report: Callable[[Fault], None]
) -> tuple[int, int]:
    """Run programs in batches and report those that differ.

    Args:
        search: makes the programs.
        numbers: of the programs.
        shrink: how many to shrink; for others there are some seconds only.
        report: called with each.

    Returns:
        How many programs ran, and how many differ.
    """
    differing = 0
    for first in range(numbers.start, numbers.stop, BATCH):
        for number in search.batch(range(first, min(first + BATCH, numbers.stop))):
            differing += 1
            if differing <= shrink:
                report(search.shrink(number))
            else:
                report(search.fault(number))
    return len(numbers), differing
