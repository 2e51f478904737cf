"""A long program with views and shapes that never come again does not fill the memory.

Nothing is computed here: what is recorded is dropped before it would run.
"""

from __future__ import annotations

import gc

import torch

import isoshard.torch_bridge as xs
from isoshard.core.bounded import CALLS
from isoshard.torch_bridge.engine import base
from isoshard.torch_bridge.engine.value import Aval, Value
from tests.torch_bridge.engine.growth import instances, larger, resident, tables

COUNT = 50_000
SETTLE = CALLS + 200
"""Views of each kind before anything is measured: the tables of recent calls are full then."""

BOUND = 2 * CALLS
"""Entries that a table may gain, and objects of a class, which is less than the views of each kind.
An operator keeps between half of `CALLS` and all of them, and a use has up to two operators."""

MEGABYTES = 16
"""What the process may gain once the tables are full."""


def dead_slices(x: torch.Tensor, start: int, stop: int) -> None:
    """Each is dropped at once."""
    for number in range(start, stop):
        x[number : number + 3]


def living_slices(x: torch.Tensor, start: int, stop: int) -> None:
    """A thousand live at a time."""
    held = []
    for number in range(start, stop):
        held.append(x[number : 2 * number + 5])
        if len(held) == 1000:
            held.clear()


def rows(x: torch.Tensor, start: int, stop: int) -> None:
    """Single elements, seen through two views."""
    for number in range(start, stop):
        x[number].unsqueeze(0)


def shapes(x: torch.Tensor, start: int, stop: int) -> None:
    """Each operation has a shape of its own; its result is dropped."""
    for number in range(start, stop):
        x[: number + 1] + 1.5
        if number % 500 == 0:
            xs.sync()
    xs.sync()


def writes(x: torch.Tensor, start: int, stop: int) -> None:
    """Each writes to another part of new memory, which is dropped before it is computed."""
    for begin in range(start, stop, 100):
        memory = x.clone()
        for number in range(begin, min(begin + 100, stop)):
            memory[number : number + 2] = 1.0
        del memory
        xs.sync()


USES = (dead_slices, living_slices, rows, shapes, writes)


def test_views_that_never_come_again_leave_nothing_behind():
    count = COUNT // len(USES)
    assert count > BOUND
    x = torch.zeros(4 * COUNT, device="jax")
    xs.sync()
    for use in USES:
        use(x, 0, SETTLE)
    gc.collect()
    start, faults = resident(), []
    for use in USES:
        before = tables(), instances()
        use(x, SETTLE, SETTLE + count)
        gc.collect()
        where = f"after {count} of {use.__name__}:"
        faults += [f"{where} {n} more in {t}" for t, n in larger(before[0], tables(), BOUND)]
        faults += [f"{where} {n} more of {c}" for c, n in larger(before[1], instances(), BOUND)]
    grown = (resident() - start) / 2**20
    if grown > MEGABYTES:
        faults.append(f"{grown:.0f} MB stay of {COUNT} views")
    assert not faults, "\n".join(faults)


def test_a_table_that_grows_is_found():
    before = tables(), instances()
    avals = [Aval.contiguous((3, number, 1, 5, 1), torch.float32) for number in range(9)]
    kept = [base.fresh(aval, Value(None)) for aval in avals]
    assert larger(before[0], tables(), len(kept) - 1)
    assert dict(larger(before[1], instances(), len(kept) - 1))["Storage"] == len(kept)
