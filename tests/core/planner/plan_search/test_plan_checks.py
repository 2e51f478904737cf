"""Few checks: what one of an idea was found to need, the others of it are expected to need."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from isoshard.core.plan import Plan
from isoshard.core.planner.plan_search.close_look import SeenPlan
from isoshard.core.planner.plan_search.plan_checks import (
    CHECKED,
    FITTING,
    GROWN,
    PlanChecks,
)
from isoshard.core.planner.plan_search.plan_cost import PlanCost, SearchDepth

LIMIT = 100


class Axes(NamedTuple):
    """What is asked of a mesh."""

    axis_names: tuple[str, ...] = ("data",)


class Known(NamedTuple):
    """What is asked of a candidate."""

    key: str
    kind: str
    mesh: Axes


def plan(key: str, seconds: float, memory: int, depth: SearchDepth = "trace") -> SeenPlan:
    """A plan of the idea that the first letter of its name says."""
    known: Any = Known(key, key[0], Axes())
    return SeenPlan(known, Plan(), PlanCost(seconds, 0.0, {}, memory, LIMIT, depth), {})


class Machine:
    """Checks that find memory, or seconds, to be so many times those of the look."""

    def __init__(self, memory: dict[str, float], seconds: dict[str, float] | None = None) -> None:
        self.memory, self.seconds = memory, seconds or {}
        self.written: list[str] = []
        self.split: list[str] = []

    def as_written(self, one: SeenPlan) -> SeenPlan:
        key = one.candidate.key
        self.written.append(key)
        more = self.memory.get(key, self.memory.get(key[0], 1.0))
        cost = dataclasses.replace(one.cost, memory=int(one.cost.memory * more))
        return dataclasses.replace(one, cost=cost)

    def partitioned(self, one: SeenPlan) -> SeenPlan:
        key = one.candidate.key
        self.split.append(key)
        more = self.seconds.get(key, self.seconds.get(key[0], 1.0))
        cost = dataclasses.replace(one.cost, seconds=one.cost.seconds * more, depth="partition")
        return dataclasses.replace(one, cost=cost)


def keys(plans: list[SeenPlan]) -> list[Any]:
    return [one.candidate.key for one in plans]


def test_what_is_fast_and_fits_is_checked_and_no_other():
    machine = Machine({})
    found = [plan("a1", 2.0, 80), plan("b1", 1.0, 90), plan("c1", 0.5, 101)]
    ranked = PlanChecks(machine.as_written).settled(found, 1, leanest=False)
    assert keys(ranked) == ["b1", "a1", "c1"]
    assert machine.written == ["b1"]


def test_what_grows_like_one_that_did_not_fit_is_passed_over():
    machine = Machine({"a": 1.3, "b": 1.1})
    found = [plan(f"a{n}", 1.0 + n / 10, 80) for n in range(6)] + [plan("b1", 2.0, 88)]
    ranked = PlanChecks(machine.as_written).settled(found, 1, leanest=False)
    assert machine.written == ["a0", "b1"]
    assert ranked[0].candidate.key == "b1" and ranked[0].cost.memory == 96
    assert [one.cost.memory for one in ranked[1:]] == [104] * 6


def test_one_of_the_same_idea_that_is_lean_enough_is_checked():
    machine = Machine({"a": 1.3})
    found = [plan("a1", 1.0, 80), plan("a2", 2.0, 75), plan("b1", 3.0, 50)]
    ranked = PlanChecks(machine.as_written).settled(found, 1, leanest=False)
    assert machine.written == ["a1", "a2"] and ranked[0].candidate.key == "a2"


def test_at_last_the_leanest_is_checked_though_it_is_not_expected_to_fit():
    machine = Machine({"a1": 1.2, "a2": 1.18, "a3": 1.0})
    found = [plan("a1", 1.0, 90), plan("a2", 2.0, 88), plan("a3", 3.0, 89)]
    checks = PlanChecks(machine.as_written)
    ranked = checks.settled(found, 1, leanest=False)
    assert machine.written == ["a1"] and not ranked[0].cost.fits
    ranked = checks.settled(found, 1, leanest=True)
    assert machine.written == ["a1", "a2", "a3"]
    assert ranked[0].candidate.key == "a3" and ranked[0].cost.fits


def test_nothing_over_memory_comes_first_however_many_there_are():
    machine = Machine(dict.fromkeys("abcdefghijklmnopqrst", 1.05))
    found = [plan(f"{one}1", 1.0, 98) for one in machine.memory]
    ranked = PlanChecks(machine.as_written).settled(found, 1, leanest=True)
    assert len(machine.written) == CHECKED
    assert not any(one.cost.fits for one in ranked[:CHECKED])


def test_what_is_far_from_fitting_is_not_checked():
    machine = Machine(dict.fromkeys("abcdef", 1.3))
    found = [plan(f"{one}1", 1.0, 90) for one in machine.memory]
    ranked = PlanChecks(machine.as_written).settled(found, 1, leanest=True)
    assert machine.written == [f"{one}1" for one in "abcdef"[:GROWN]]
    assert [one.cost.memory for one in ranked] == [117] * 6


def test_two_ideas_that_grew_do_not_speak_for_all():
    machine = Machine({"a": 2.0, "b": 12.0})
    found = [plan("a1", 1.0, 90), plan("b1", 2.0, 90), plan("c1", 3.0, 98)]
    ranked = PlanChecks(machine.as_written).settled(found, 1, leanest=False)
    assert machine.written == ["a1", "b1", "c1"] and ranked[0].candidate.key == "c1"


def test_what_the_last_word_finds_slow_lets_the_next_idea_have_its_turn():
    machine = Machine({}, seconds={"a": 2.0})
    found = [plan(f"a{n}", 1.0 + n / 100, 50) for n in range(8)] + [plan("b1", 1.5, 50)]
    checks = PlanChecks(machine.as_written, machine.partitioned)
    ranked = checks.settled(found, 2, leanest=False)
    assert machine.split == ["a0", "b1"]
    assert keys(ranked[:2]) == ["b1", "a0"]
    assert [one.cost.depth for one in ranked[:2]] == ["partition"] * 2


def test_few_that_fit_are_checked():
    """Each that is checked is slower than the next one seems, and one was as fast as it seemed."""
    machine = Machine({}, seconds=dict.fromkeys("bcdefgh", 3.0) | {"a": 1.0})
    found = [plan("a1", 0.9, 50), *(plan(f"{one}1", 1.0, 50) for one in "bcdefgh")]
    ranked = PlanChecks(machine.as_written, machine.partitioned).settled(found, 2, leanest=False)
    assert len(machine.split) == FITTING and len(ranked) == len(found)


def test_what_is_slower_in_all_ideas_does_not_prolong_it():
    machine = Machine({}, seconds=dict.fromkeys("abcdefgh", 3.0))
    found = [plan(f"{one}1", 1.0 + n / 10, 50) for n, one in enumerate(machine.seconds)]
    ranked = PlanChecks(machine.as_written, machine.partitioned).settled(found, 2, leanest=False)
    assert machine.split == ["a1", "b1"] == keys(ranked[:2])


def test_what_made_a_plan_faster_is_expected_of_other_ideas_too():
    machine = Machine({}, {"a": 0.8, "b": 0.6})
    found = [plan("a1", 1.0, 80), plan("b1", 1.1, 80), plan("a2", 1.15, 80)]
    checks = PlanChecks(machine.as_written, machine.partitioned)
    ranked = checks.settled(found, 2, leanest=False)
    assert machine.split == ["a1", "b1"]
    assert keys(ranked) == ["b1", "a1", "a2"] and ranked[0].cost.seconds == 1.1 * 0.6
