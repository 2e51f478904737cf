"""A long program with views and shapes that never come again does not fill the memory.

Nothing is computed here: what is recorded is dropped before it would run.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.core.runtime.caches import CALLS, Recent
from isoshard.torch_bridge.engine.compiling.program import compiled_count
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recipes import RECIPES, Recipe
from isoshard.torch_bridge.engine.values.value import Aval, Value
from isoshard.torch_bridge.engine.values.views import Chain
from tests.torch_bridge.engine.growth import instances, larger, tables

FEW = 64
"""Calls that an operator keeps here, in place of `CALLS`."""

COUNT = 3 * FEW // 2
"""Views of each kind: first unmeasured, so that the tables of recent calls are full; then
measured."""

BOUND = FEW + FEW // 16
"""Entries that a table may gain, and objects of a class. An operator keeps between half of `FEW`
and all of them, and a use has up to two operators."""


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Tables of recent calls with a bound that a test reaches soon."""
    put, bounded = Recent.__setitem__, []

    def into_few(table, key, value):
        if table.half == CALLS // 2:
            bounded.append(table)
            table.half = FEW // 2
        put(table, key, value)

    monkeypatch.setattr(Recent, "__setitem__", into_few)
    yield
    for table in bounded:
        table.half = CALLS // 2


def living_slices(x: torch.Tensor, start: int, stop: int) -> None:
    """Some live at a time."""
    held = []
    for number in range(start, stop):
        held.append(x[number : 2 * number + 5])
        if len(held) == 20:
            held.clear()


def rows(x: torch.Tensor, start: int, stop: int) -> None:
    """Single elements, seen through two views."""
    for number in range(start, stop):
        x[number].unsqueeze(0)


def writes(x: torch.Tensor, start: int, stop: int) -> None:
    """Each writes to another part of new memory, which is dropped before it is computed."""
    for begin in range(start, stop, 20):
        memory = x.clone()
        for number in range(begin, min(begin + 20, stop)):
            memory[number : number + 2] = 1.0
        del memory
        xs.sync()


USES = (living_slices, rows, writes)


def test_views_that_never_come_again_leave_nothing_behind():
    x = torch.zeros(8 * COUNT, device="jax")
    xs.sync()
    for use in USES:
        use(x, 0, COUNT)
    faults = []
    after = tables(), instances()
    for use in USES:
        before = after
        use(x, COUNT, 2 * COUNT)
        gc.collect()
        after = tables(), instances()
        where = f"after {COUNT} of {use.__name__}:"
        faults += [f"{where} {n} more in {t}" for t, n in larger(before[0], after[0], BOUND)]
        faults += [f"{where} {n} more of {c}" for c, n in larger(before[1], after[1], BOUND)]
    assert not faults, "\n".join(faults)


def test_what_is_alive_is_found_again_though_its_call_is_forgotten():
    x = torch.zeros(5 * FEW, device="jax")
    view, same = x[5:9][1], Chain.root(x._aval)
    aval = weakref.ref(Aval.of(x[: FEW + 7]._aval.meta))
    chain, read = view._chain, lazy_tensor.read(view).tape
    numbers = {entry[0] for entry in read.program if isinstance(entry[0], int)}
    living_slices(x, 10, 10 + 2 * FEW)
    gc.collect()
    assert aval() is None
    assert x[5:9][1]._chain is chain and Chain.root(x._aval) is same
    assert all(RECIPES[number].id == number for number in numbers)


def test_a_program_is_found_again_though_its_calls_are_forgotten():
    def step():
        return float((x[17:40].mul(2.5) + x[3]).sum())

    x = torch.ones(8 * FEW, device="jax")
    expected = [step(), step()]
    compiled = compiled_count()
    one = x[3]
    for number in range(100, 100 + FEW + FEW // 16):
        part = x[: number + 1]
        part.mul(2.5), part + one, part.sum(), x[number + 200]
    del one, part
    xs.sync()
    gc.collect()
    assert [step(), step()] == expected
    assert compiled_count() == compiled


def test_the_number_of_a_recipe_is_never_given_again():
    numbers = set()
    for _ in range(100):
        recipe = Recipe("nothing", lambda *_: [], 0)
        number = recipe.id
        assert RECIPES[number] is recipe and number not in numbers
        numbers.add(number)
        del recipe
        assert number not in RECIPES


def test_a_table_that_grows_is_found():
    before = tables(), instances()
    avals = [Aval.contiguous((3, number, 1, 5, 1), torch.float32) for number in range(9)]
    kept = [lazy_tensor.fresh(aval, Value(None)) for aval in avals]
    assert larger(before[0], tables(), len(kept) - 1)
    assert dict(larger(before[1], instances(), len(kept) - 1))["Storage"] == len(kept)
