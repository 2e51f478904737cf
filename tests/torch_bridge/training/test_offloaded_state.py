"""Torch training steps whose optimizer state, or parameters, rest in the memory of the host."""

import jax
import pytest
import torch
from jax.sharding import AxisType, NamedSharding

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan, metrics
from isoshard.core.plan import PlanError
from tests.jax_faults import host_memory_of_the_cpu

HOST = "pinned_host"


@pytest.fixture(params=[AxisType.Explicit])
def typed(request):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(request.param,) * 2)


EITHER = pytest.mark.parametrize("typed", [AxisType.Auto, AxisType.Explicit], indirect=True)


def built(mesh, memory):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    plan = Plan({"*.weight": ("y",), "*": P()}, memory=memory)
    iso.shard(model, mesh, plan)
    return model, torch.optim.AdamW(model.named_parameters(), 0.1), plan


def trained(mesh, memory, compiled, told=True):
    model, optimizer, plan = built(mesh, memory)
    if memory and told:
        assert iso.shard(optimizer, mesh, plan) is optimizer
    x = iso.shard(torch.arange(64.0).reshape(8, 8) / 64, mesh, P("x"))

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
    if not told:  # the parameters move in each step
        return model, optimizer, losses
    assert counts["compilations"] == 0 and counts.get("transfers.between_devices", 0) == 0
    return model, optimizer, losses


def kinds(optimizer, slot):
    return {iso.sharding_of(state[slot]).memory_kind for state in optimizer.state.values()}


@host_memory_of_the_cpu
def test_state_on_the_host_gives_the_same_training(typed):
    plain, _, losses = trained(typed, {}, True)
    model, optimizer, found = trained(typed, {"*.exp_avg": HOST}, True)
    assert found == losses
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach().cpu(), rtol=0, atol=0)
    assert kinds(optimizer, "exp_avg") == {HOST}
    assert kinds(optimizer, "exp_avg_sq") == {"device"}
    state = iso.to_jax(optimizer.state[model[0].weight]["exp_avg"])
    assert state.sharding == NamedSharding(typed, P("y"), memory_kind=HOST)


def test_parameters_on_the_host_and_their_state_with_them(typed):
    plain, _, losses = trained(typed, {}, False)
    model, optimizer, found = trained(typed, {"0.*": HOST}, False, told=False)
    assert found == losses
    where = {n: iso.sharding_of(p).memory_kind for n, p in model.named_parameters()}
    assert where == {"0.weight": HOST, "0.bias": HOST, "2.weight": "device", "2.bias": "device"}
    assert iso.sharding_of(optimizer.state[model[0].weight]["exp_avg"]).memory_kind == HOST
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach().cpu(), rtol=0, atol=0)


@EITHER
def test_state_that_is_there_already_moves(typed):
    model, optimizer, _ = built(typed, {})
    model(torch.ones(8, device="jax")).sum().backward()
    optimizer.step()
    before = optimizer.state[model[0].weight]["exp_avg"].cpu()
    iso.shard(optimizer, typed, Plan(memory={"state.0.weight.exp_avg": HOST}))
    slot = optimizer.state[model[0].weight]["exp_avg"]
    assert iso.to_jax(slot).sharding.memory_kind == HOST
    torch.testing.assert_close(slot.cpu(), before, rtol=0, atol=0)


def adafactor(mesh, memory):
    torch.manual_seed(0)
    layer = iso.shard(torch.nn.Linear(8, 16), mesh, Plan({"weight": ("y",), "*": P()}))
    optimizer = torch.optim.Adafactor(layer.named_parameters(), 0.1)
    if memory:
        iso.shard(optimizer, mesh, Plan(memory=memory))
    x = iso.shard(torch.arange(64.0).reshape(8, 8) / 64, mesh, P("x"))
    for _ in range(2):
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer, optimizer.state[layer.weight], optimizer


@host_memory_of_the_cpu
def test_slots_of_another_shape_than_their_parameter_rest_as_they_lie(typed):
    plain, theirs, _ = adafactor(typed, {})
    layer, mine, _ = adafactor(typed, {"state.*": HOST})
    torch.testing.assert_close(layer.weight.cpu(), plain.weight.cpu(), rtol=0, atol=0)
    for slot in ("row_var", "col_var"):
        lies = iso.sharding_of(theirs[slot])
        assert iso.sharding_of(mine[slot]) == lies.with_memory_kind(HOST)
        assert iso.to_jax(mine[slot]).sharding.memory_kind == HOST


def test_the_slots_of_a_parameter_that_is_one_number_rest_too(typed):
    layer = torch.nn.Module()
    layer.scale = torch.nn.Parameter(torch.tensor(2.0))
    iso.shard(layer, typed, P())
    optimizer = torch.optim.Adam(layer.named_parameters())
    iso.shard(optimizer, typed, Plan(memory={"*.exp_avg": HOST}))
    layer.scale.square().backward()
    optimizer.step()
    assert kinds(optimizer, "exp_avg") == {HOST} and kinds(optimizer, "exp_avg_sq") == {"device"}


def test_what_is_refused(typed):
    _, state, optimizer = adafactor(typed, {})
    state["col_var"] = state["col_var"][0]
    with pytest.raises(iso.ShardingError, match=r"state\.weight\.col_var: a memory rule"):
        iso.shard(optimizer, typed, Plan(memory={"state.*": HOST}))
    assert iso.sharding_of(state["row_var"]).memory_kind == "device"  # nothing moved
    _, optimizer, _ = built(typed, {})
    for spec in (P("x"), Plan({"*": P()})):
        with pytest.raises(TypeError, match=r"state follows; a Plan with memory= offloads it"):
            iso.shard(optimizer, typed, spec)
    with pytest.raises(iso.ShardingError, match=r"rule '\*': its devices \(cpu\) have"):
        iso.shard(optimizer, typed, Plan(memory={"*": "disk"}))
    optimizer = torch.optim.Adam(torch.nn.Linear(2, 2).named_parameters())  # on no mesh
    with pytest.raises(iso.ShardingError, match="weight, bias of the optimizer are on no mesh"):
        iso.shard(optimizer, typed, Plan(memory={"*": HOST}))


@pytest.mark.parametrize(
    ("slot", "capturable", "message"),
    [
        ("step", True, "match no parameter and no slot"),
        ("momentum", False, r"match no.*state\.0\.weight\.exp_avg"),
    ],
)
def test_a_rule_that_matches_nothing(typed, slot, capturable, message):
    model, _, _ = built(typed, {})
    optimizer = torch.optim.Adam(model.named_parameters(), capturable=capturable)
    iso.shard(optimizer, typed, Plan(memory={f"*.{slot}": HOST}))
    model(torch.ones(8, device="jax")).sum().backward()
    with pytest.raises(PlanError, match=rf"'\*\.{slot}' {message}"):
        optimizer.step()
