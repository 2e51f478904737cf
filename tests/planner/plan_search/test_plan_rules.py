"""Layouts by name as rules: few, readable, and each name gets what it should."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from isoshard.core.plan import Plan
from isoshard.planner.machine.topologies import topology
from isoshard.planner.plan_search.plan_rules import activation_rules_of, input_rules_of, rules_of

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
        {"layers.*[02468].weight": P(None, "model"), "layers.*[13579].weight": P("model")},
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
def test_rules_are_those_of_a_person_and_give_each_name_its_spec(case):
    specs, wanted = CASES[case]
    assert rules_of(specs) == wanted
    mesh = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
    resolved = Plan(rules_of(specs)).resolve(dict.fromkeys(specs, (64, 64)), mesh, strict=True)
    assert resolved.specs == {name: P(*spec) for name, spec in specs.items()}


def test_the_batch_is_said_once_or_by_name():
    assert input_rules_of({"tokens": P("data"), "labels": P("data")}) == P("data")
    assert input_rules_of({"x": P()}) is None
    found = input_rules_of({"batch.x": P("data", "model"), "batch.y": P("data"), "step": P()})
    assert found == {"*y": P("data"), "*step": None, "*": P("data", "model")}


def test_outputs_of_layers_are_said_once_whatever_lies_in_them():
    inner, out, head = P("data", None, "model"), P("data", "model"), P("data")
    specs = {"embed": out, "head": head} | _layers(
        12, norm=out, mlp__up=inner, mlp__gate=inner, mlp__down=out
    )
    specs |= {f"layers.{n}": out for n in range(12)}
    rules = activation_rules_of(specs)
    assert len(rules) <= 7 and "layers.*" in rules
    plan = Plan(activations=rules)
    for name, spec in specs.items():
        said = plan.activation_for(name)
        assert said is not None and said.parts[0][1].output == spec


def test_what_is_left_to_the_compiler_is_not_said_by_chance():
    specs = {f"layers.{n}": P("data") for n in range(3)}
    specs |= {f"layers.{n}.attn": P() for n in range(3)}
    rules = activation_rules_of(specs)
    assert rules == {"re:layers[.][0-9]+": P("data")}
    assert Plan(activations=rules).activation_for("layers.1.attn") is None
