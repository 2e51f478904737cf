"""A plan with the names of one framework, given a model of the other: it says so."""

import pytest
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import make_mesh
from isoshard.core.plan import Linear, Plan, PlanError

MESH = make_mesh((2, 4), ("data", "model"))
TORCH = {"0.up.weight": (64, 32), "0.norm.weight": (32,), "wte.weight": (128, 32)}
FLAX = {"0.up.kernel": (32, 64), "0.norm.scale": (32,), "wte.embedding": (128, 32)}
OF_TORCH = {"*.up.weight": P("model", "data"), "wte.weight": P("model")}


@pytest.mark.parametrize("rest", [{"*": None}, {}, {"*": P("data")}])
def test_rules_of_torch_on_a_flax_model_are_a_fault(rest):
    Plan(OF_TORCH | rest).resolve(TORCH, MESH)
    with pytest.raises(PlanError, match="as another framework does") as caught:
        Plan(OF_TORCH | rest).resolve(FLAX, MESH)
    text = str(caught.value)
    assert "'*.up.weight' decides nothing, and 0.up.kernel " in text
    assert "write '*.up.*': Linear(out='model', into='data')" in text
    assert "write 'wte.*': P('model',)" in text and "norm" not in text
    assert ("is sharded by '*'" if rest else "has no rule") in text


def test_and_the_other_way_round():
    plan = Plan({"*.up.kernel": P("data", "model"), "*": None})
    with pytest.raises(PlanError, match=r"write '\*.up.\*': Linear\(out='model', into='data'\)"):
        plan.resolve(TORCH, MESH)


def test_what_it_says_to_write_lays_out_both():
    plan = Plan({"*.up.*": Linear(out="model", into="data"), "wte.*": P("model"), "*": None})
    torch, flax = plan.resolve(TORCH, MESH).specs, plan.resolve(FLAX, MESH).specs
    assert torch["0.up.weight"] == P("model", "data")
    assert flax["0.up.kernel"] == P("data", "model")
    assert torch["wte.weight"] == flax["wte.embedding"] == P("model")


def test_in_a_product_each_factor_is_looked_at():
    plan = Plan({"*.up.weight": P("model"), "*": None}) * Plan.fsdp("data", min_bytes=0)
    with pytest.raises(PlanError, match=r"'\*.up.weight' decides nothing"):
        plan.resolve(FLAX, MESH)


@pytest.mark.parametrize(
    "rules",
    [
        {"*.up.weight": P("model"), "*.up.kernel": P(None, "model"), "*": None},
        {"*.kernel": P("data"), "*.up.weight": P("model"), "*": None},
        {"*.down.weight": P("model"), "*": None},
        {"*.norm.weight": None, "*": P("data")},
        {"re:.*[.]up[.]weight": P("model"), "*": None},
    ],
    ids=["both are named", "decided before", "no such layer", "whole on purpose", "regular"],
)
def test_other_rules_may_decide_nothing(rules):
    assert Plan(rules).resolve(FLAX, MESH).unused
