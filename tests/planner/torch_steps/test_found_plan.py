"""Plans found for steps of torch: no weights, rules that resolve, costs as `estimate` tells."""

from __future__ import annotations

import pytest
import torch
from jax.sharding import NamedSharding

import isoshard as iso
from isoshard.core.traced.traced_step import GRADIENT
from isoshard.planner.estimating import estimate
from isoshard.planner.machine.topologies import topology
from isoshard.planner.plan_search.constrained_step import module_of
from isoshard.planner.plan_search.plan_cost import cost_of
from isoshard.planner.plan_search.plan_rules import fixed_layouts
from isoshard.planner.plan_search.searched_step import searched
from isoshard.planner.plan_search.searching import search
from isoshard.planner.traced.of_step import traced_step
from isoshard.torch_bridge.recompute import checkpoint_module
from tests.planner.torch_steps import steps
from tests.planner.torch_steps.steps import batch_for, llama


@pytest.fixture(scope="module")
def training():
    with torch.device("meta"):
        model = llama(2)
    return (
        model,
        steps.training(model, torch.optim.SGD(model.parameters(), momentum=0.9)),
        (batch_for(model),),
    )


def test_a_plan_is_found_and_costs_what_estimate_tells():
    with torch.device("meta"):
        model = steps.Mlp()
    step = steps.training(model, torch.optim.SGD(model.parameters(), momentum=0.9))
    args = (batch_for(model),)
    mesh = topology("v5e:2x4").mesh((8,), ("data",))
    found = search(step, args, mesh, candidates=1)
    assert not found.plan.resolve(model, mesh, strict=True).unmatched
    report = estimate(step, args, mesh, found.plan)
    assert report.memory.peak == found.cost.memory
    assert report.time.overlapped == pytest.approx(found.cost.seconds, rel=1e-6)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_a_search_tells_of_a_plan_what_the_step_costs_that_is_traced_under_it(training):
    """Nothing that a trace without a plan lays out, updated weights say, is left in it."""
    _, step, args = training
    mesh = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
    traced = traced_step(step, args, {}, mesh)
    columns = {"*.up_proj.weight": ("model",), "*.down_proj.weight": (None, "model")}
    plan = iso.Plan(
        {**columns, "*": None}, inputs=("data",), activations={"model.layers.[0-9]": ("data",)}
    )
    outputs = {f"model.layers.{n}": NamedSharding(mesh, iso.P("data")) for n in (0, 1)}
    layouts = fixed_layouts(plan, traced, mesh)
    told = searched(traced).cost(layouts, mesh, 2**40, outputs)
    laid = searched(traced_step(step, args, {}, mesh, plan)).looped
    assert cost_of(laid, {}, mesh, 2**40).seconds == pytest.approx(told.seconds, rel=1e-3)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_marks_of_gradients_leave_layers_equal(again):
    with torch.device("meta"):
        model = llama(4)
        ids = torch.empty(8, 32, dtype=torch.long)
    for layer in model.model.layers if again else ():
        checkpoint_module(layer)
    mesh = topology("v5e:2x4").mesh((8,), ("data",))
    found = traced_step(
        lambda ids: model(input_ids=ids, labels=ids).loss.backward(), (ids,), {}, mesh
    )
    scans = [one for one in searched(found).looped.program.eqns if one.primitive.name == "scan"]
    assert [one.params["length"] for one in scans] == [3, 3]
    marked = [module_of(one, GRADIENT) for one in found.program.eqns]
    # Behind the barrier of what is computed again the gradient is a value of its own.
    wanted = "model.layers.1" if again else "model.layers.1,model.layers.1.mlp"
    assert any(one and one.startswith(wanted) for one in marked)
