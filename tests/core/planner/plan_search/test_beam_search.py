"""The search over choices, against all there are."""

from __future__ import annotations

import itertools

import pytest

from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.plan_search.analytic_cost import AnalyticCost, Choice
from isoshard.core.planner.plan_search.beam_search import BeamSearch
from tests.core.planner.plan_search.small_families import program


@pytest.fixture(scope="module")
def cost() -> AnalyticCost:
    mesh = topology("v5e:4x4").mesh((4, 4), ("data", "model"))
    return AnalyticCost(program("MLP"), mesh)


def test_the_beam_finds_the_best_of_all_choices(cost):
    beam = BeamSearch(cost, 1e12)
    best = beam.run(1)[0].cost.seconds
    dims = sorted({one for group in cost.program.dimensions.groups for one in group.dimensions})
    orders = [one for size in range(3) for one in itertools.permutations(dims, size)]
    groups = [n for n, one in enumerate(cost.program.dimensions.groups) if one.role != "input"]
    stores = [
        frozenset(one) for size in (0, len(groups)) for one in itertools.combinations(groups, size)
    ]
    least = min(
        cost.of(Choice(split, stored)).seconds
        for split in itertools.product(orders, repeat=2)
        for stored in itertools.product(stores, repeat=2)
    )
    assert best <= least * 1.01


def test_with_less_memory_it_finds_what_fits(cost):
    roomy = BeamSearch(cost, 1e12).run(1)[0].cost
    tight = BeamSearch(cost, roomy.memory * 0.8).run(1)[0].cost
    assert tight.memory <= roomy.memory * 0.8
    assert tight.seconds >= roomy.seconds


def test_axes_that_are_alike_are_tried_in_one_order(cost):
    first, second = (0,), (1,)
    beam = BeamSearch(cost, 1e12)
    none = frozenset[int]()
    one = Choice((first, second), (none, none))
    other = Choice((second, first), (none, none))
    assert beam.layouts(one) == beam.layouts(other)
    assert beam.strategy(one) == beam.strategy(other)


def test_of_each_strategy_there_is_one(cost):
    found = BeamSearch(cost, 1e12).run(6)
    beam = BeamSearch(cost, 1e12)
    strategies = [beam.strategy(one.choice) for one in found]
    assert len(set(strategies)) == len(found) > 1
    assert [one.score for one in found] == sorted(one.score for one in found)
