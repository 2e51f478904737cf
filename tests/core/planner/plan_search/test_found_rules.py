"""Layouts by name as rules: few, readable, and each name gets what it should."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from isoshard.core.plan import Plan
from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.plan_search.found_rules import input_rules_of, rules_of

BOTH = P(("data", "model"))


def _layers(count: int, **specs: P) -> dict[str, P]:
    return {
        f"layers.{n}.{name.replace('__', '.')}": spec
        for n in range(count)
        for name, spec in specs.items()
    }


CASES = {
    "by module": (
        _layers(12, q__weight=P("model"), o__weight=P(None, "model"), norm__weight=P()),
        {"*.q.weight": P("model"), "*.o.weight": P(None, "model"), "*": None},
    ),
    "all alike": (
        _layers(3, q__weight=BOTH, k__weight=BOTH, v__weight=BOTH, norm__weight=P()),
        {"*.norm.weight": None, "*.weight": BOTH},
    ),
    "every second": (
        {f"layers.{n}.weight": P("model") if n % 2 else P(None, "model") for n in range(12)},
        {
            "layers.*[02468].weight": P(None, "model"),
            "layers.*[13579].weight": P("model"),
        },
    ),
    "each its own": (
        {"tables.0.weight": P("data"), "tables.1.weight": P("model"), "tables.2.weight": P()},
        {"tables.0.weight": P("data"), "tables.1.weight": P("model"), "*": None},
    ),
    "of two stacks": (
        {"encoder.0.up.weight": P("data"), "decoder.0.up.weight": P("model")},
        {"encoder.*.up.weight": P("data"), "decoder.*.up.weight": P("model")},
    ),
    "without dots": ({"up": P("model"), "down": P()}, {"up": P("model"), "*": None}),
    "none": ({"a.weight": P(), "b.bias": P()}, {"*": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_rules_are_those_of_a_person(case):
    specs, wanted = CASES[case]
    assert rules_of(specs) == wanted


@pytest.mark.parametrize("case", CASES)
def test_a_plan_of_them_gives_each_name_its_spec(case):
    specs, _ = CASES[case]
    mesh = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
    resolved = Plan(rules_of(specs)).resolve(dict.fromkeys(specs, (64, 64)), mesh, strict=True)
    assert resolved.specs == {name: P(*spec) for name, spec in specs.items()}


def test_the_batch_is_said_once_or_by_name():
    assert input_rules_of({"tokens": P("data"), "labels": P("data")}) == P("data")
    assert input_rules_of({"x": P()}) is None
    found = input_rules_of({"batch.x": P("data", "model"), "batch.y": P("data"), "step": P()})
    assert found == {"*y": P("data"), "*step": None, "*": P("data", "model")}
