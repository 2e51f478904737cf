"""Rules for the slots of a torch optimizer: split though the parameters are not."""

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan, metrics

ZERO = Plan({"*.exp_avg*": P("x"), "*": None})


@pytest.fixture(scope="module")
def mesh():
    return iso.make_mesh((2, 4), ("x", "y"))


def trained(mesh, plan, compiled=True, named=True, optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    iso.shard(model, mesh, P())
    optimizer = optimizer(model.named_parameters() if named else model.parameters(), 0.1)
    if plan is not None:
        assert iso.shard(optimizer, mesh, plan) is optimizer
    x = iso.shard(torch.arange(64.0).reshape(8, 8) / 64, mesh, P("y"))

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = xs.compile(step) if compiled else step
    losses = []
    for n in range(4):
        if n == 2:
            metrics.reset()
        losses.append(step(x).item())
    counts = metrics.counters()
    assert counts["compilations"] == 0 and counts.get("transfers.between_devices", 0) == 0
    return model, optimizer, losses


def spec(optimizer, parameter, slot):
    return iso.sharding_of(optimizer.state[parameter][slot]).spec


@pytest.mark.parametrize(("compiled", "named"), [(True, True), (False, False)])
def test_moments_are_split_and_parameters_are_not(mesh, compiled, named):
    _, _, want = trained(mesh, None, compiled)
    model, optimizer, losses = trained(mesh, ZERO, compiled, named)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(want), rtol=1e-6, atol=1e-7)
    for parameter in model.parameters():
        assert spec(optimizer, parameter, "exp_avg") == P("x")
        assert spec(optimizer, parameter, "exp_avg_sq") == P("x")
        assert iso.sharding_of(parameter).spec == P()


def test_one_slot_and_a_product(mesh):
    plan = Plan({"*exp_avg": P("x")}) * Plan({"*.weight": P(None, "y")})
    model, optimizer, _ = trained(mesh, plan, compiled=False)
    assert spec(optimizer, model[0].weight, "exp_avg") == P("x", "y")
    assert spec(optimizer, model[0].weight, "exp_avg_sq") == P()


def test_a_rule_that_names_no_slot_is_told(mesh):
    with pytest.warns(
        iso.errors.UnusedRuleWarning, match=r"no rule for the state of AdamW.*exp_avg"
    ):
        trained(mesh, Plan({"*.mu.*": P("x"), "*": None}), compiled=False)


def test_a_plan_without_rules_for_slots_is_refused(mesh):
    layer = iso.shard(torch.nn.Linear(4, 4), mesh, P())
    with pytest.raises(TypeError, match="one with rules for slots"):
        iso.shard(torch.optim.Adam(layer.parameters()), mesh, Plan({"*": None}))


def test_a_rule_that_does_not_fit(mesh):
    with pytest.raises(iso.PlanError, match=r"state\.0\.bias\.exp_avg: .*rank 1"):
        trained(mesh, Plan({"*.exp_avg": P("y", "x"), "*": None}), compiled=False)
