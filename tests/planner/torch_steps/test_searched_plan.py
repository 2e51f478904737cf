"""Searched plans of steps of torch: no weights, rules that resolve, costs as `estimate` reports."""

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


def test_the_plan_of_a_search_costs_what_estimate_reports():
    with torch.device("meta"):
        model = steps.Mlp()
    step = steps.training(model, torch.optim.SGD(model.parameters(), momentum=0.9))
    args = (batch_for(model),)
    mesh = topology("v5e:2x4").mesh((8,), ("data",))
    trace = search(step, args, mesh, candidates=1)
    assert not trace.plan.resolve(model, mesh, strict=True).unmatched
    report = estimate(step, args, mesh, trace.plan)
    assert report.memory.peak == trace.cost.memory
    assert report.time.overlapped == pytest.approx(trace.cost.seconds, rel=1e-6)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_a_search_predicts_the_cost_of_the_step_that_is_traced_under_its_plan(training):
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
    predicted = searched(traced).cost(layouts, mesh, 2**40, outputs)
    sharded = searched(traced_step(step, args, {}, mesh, plan)).looped
    assert cost_of(sharded, {}, mesh, 2**40).seconds == pytest.approx(predicted.seconds, rel=1e-3)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_marks_of_gradients_leave_layers_equal(again):
    with torch.device("meta"):
        model = llama(4)
        ids = torch.empty(8, 32, dtype=torch.long)
    for layer in model.model.layers if again else ():
        checkpoint_module(layer)
    mesh = topology("v5e:2x4").mesh((8,), ("data",))
    trace = traced_step(
        lambda ids: model(input_ids=ids, labels=ids).loss.backward(), (ids,), {}, mesh
    )
    scans = [eqn for eqn in searched(trace).looped.program.eqns if eqn.primitive.name == "scan"]
    assert [scan.params["length"] for scan in scans] == [3, 3]
    marked = [module_of(eqn, GRADIENT) for eqn in trace.program.eqns]
    # Behind the barrier of what is computed again the gradient is a value of its own.
    expected = "model.layers.1" if again else "model.layers.1,model.layers.1.mlp"
    assert any(module and module.startswith(expected) for module in marked)
