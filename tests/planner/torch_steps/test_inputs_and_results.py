"""Names, roles and shardings of the inputs and results of a traced step."""

import jax
import numpy as np
import pytest
import torch
from torch import nn

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan
from isoshard.core.frameworks import require
from isoshard.planner.machine.topologies import topology

from .steps import PLANS, Mlp, training

MESH = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
DATA = Plan.data_parallel("data")
X = jax.ShapeDtypeStruct((8, 16), np.float32)


class Net(nn.Module):
    def __init__(self, drop=0.0, norm=False):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.b(self.drop(self.norm(torch.relu(self.a(x)))))


def on_meta(make, *args, **kwargs):
    with torch.device("meta"):
        return make(*args, **kwargs)


def adam(model, **more):
    return torch.optim.AdamW(model.parameters(), **more)


def step_of(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def traced(step, *args, plan=DATA, mesh=MESH, **kwargs):
    return require("torch").traced_step(step, args, kwargs, mesh, plan)


def names(trace, role):
    return {leaf.name for leaf in trace.inputs if leaf.role == role}


PARAMETERS = {"a.weight", "a.bias", "b.weight", "b.bias"}


def check(trace, parameters=PARAMETERS, kinds=("exp_avg", "exp_avg_sq")):
    """A training step replaces parameters and state, which lies as its parameters do."""
    assert names(trace, "parameter") == set(parameters)
    state = {f"{kind}.{name}" for kind in kinds for name in parameters}
    assert state <= names(trace, "optimizer")
    by_name = {leaf.name: leaf for leaf in trace.inputs}
    assert len(by_name) == len(trace.inputs)
    for name in state:
        assert by_name[name].follows == name.partition(".")[2]
        assert by_name[name].sharding == by_name[by_name[name].follows].sharding
    replaced = {
        trace.inputs[result.replaces].name
        for result in trace.results
        if result.replaces is not None
    }
    assert replaced >= set(parameters) | state
    assert all(
        result.name == trace.inputs[result.replaces].name
        for result in trace.results
        if result.replaces is not None
    )
    shapes = [(tuple(aval.shape), aval.dtype) for aval in trace.program.in_avals]
    assert shapes == [(leaf.shape, leaf.dtype) for leaf in trace.inputs]
    assert len(trace.program.out_avals) == len(trace.results)
    assert trace.framework == "torch" and trace.wide


@pytest.mark.parametrize("device", ["cpu", "jax", "sharded"])
def test_models_on_any_device(device):
    model = Net()
    if device == "jax":
        model.to("jax")
    if device == "sharded":
        iso.shard(model, iso.make_mesh((2, 4), ("data", "model")), DATA)
    step = step_of(model, adam(model))
    check(traced(step, X))
    if device == "jax":
        step(torch.ones(8, 16, device="jax"))
        check(traced(step, X))  # with state that is there


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ("momentum_buffer",)),
        (lambda p: torch.optim.Adam(p, foreach=False), ("exp_avg", "exp_avg_sq")),
        (lambda p: torch.optim.Adam(p, fused=True), ("exp_avg", "exp_avg_sq")),
        (lambda p: torch.optim.Adam(p, amsgrad=True), ("exp_avg", "max_exp_avg_sq")),
    ],
)
def test_optimizers(make, kinds):
    model = on_meta(Net)
    optimizer = make(model.parameters())
    check(traced(step_of(model, optimizer), X), kinds=kinds)
    assert not optimizer.state


def test_models_and_optimizers_as_arguments():
    model = on_meta(Net)

    def step(model, optimizer, batch, *, scale):
        loss = model(batch["x"]).mean() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "more": [batch["x"]]}

    trace = traced(step, model, adam(model), {"x": X}, scale=2.0)
    check(trace)
    assert names(trace, "input") == {"batch.x"}
    assert [result.name for result in trace.results if result.replaces is None] == ["loss"]


def test_two_models_with_equal_names():
    generator, critic = on_meta(Net), on_meta(Net)
    first, second = adam(generator), adam(critic)

    def step(x):
        second.zero_grad()
        (critic(x) - critic(generator(x).detach())).mean().backward()
        second.step()
        first.zero_grad()
        critic(generator(x)).mean().backward()
        first.step()

    trace = traced(step, X)
    check(trace, [f"{model}.{name}" for model in ("generator", "critic") for name in PARAMETERS])
    assert {"generator.a", "critic.b"} <= set(trace.modules)


def test_tied_weights_are_a_single_input():
    model = on_meta(nn.Module)
    model.embed, model.head = on_meta(nn.Embedding, 32, 16), on_meta(nn.Linear, 16, 32, bias=False)
    model.head.weight = model.embed.weight
    optimizer = adam(model)

    def step(tokens):
        optimizer.zero_grad()
        model.head(model.embed(tokens)).logsumexp(-1).mean().backward()
        optimizer.step()

    trace = traced(step, torch.empty(8, 4, dtype=torch.long, device="meta"))
    check(trace, ["embed.weight"])


def test_random_keys_and_batch_statistics():
    model = on_meta(Net, drop=0.5, norm=True)
    trace = traced(step_of(model, adam(model)), X)
    (random,) = [leaf for leaf in trace.inputs if leaf.role == "random"]
    assert random.shape == (1, 3)
    statistics = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert names(trace, "buffer") == statistics
    assert statistics <= {result.name for result in trace.results if result.replaces is not None}
    model.eval()
    trace = traced(torch.no_grad()(lambda x: {"y": model(x)}), X)
    assert [result.name for result in trace.results if result.replaces is None] == ["y"]
    assert names(trace, "random") == names(trace, "optimizer") == set()
    trace = traced(model, X)  # a module is a step
    assert names(trace, "input") == {"x"}
    assert [result.name for result in trace.results if result.replaces is None] == ["result"]


def test_gradients_that_are_not_cleared_are_results():
    model = on_meta(Net)
    trace = traced(lambda x: model(x).sum().backward(), X)
    assert {result.name for result in trace.results} == {f"grad.{name}" for name in PARAMETERS}


def test_a_scaler_and_autocast():
    model = on_meta(Net)
    optimizer, scaler = adam(model, fused=True), torch.amp.GradScaler("jax")

    def step(x):
        optimizer.zero_grad()
        with torch.autocast("jax", dtype=torch.float16):
            loss = model(x).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    before = scaler.state_dict()
    trace = traced(step, X)
    check(trace)
    assert scaler.state_dict() == before
    dots = [eqn for eqn in trace.program.eqns if eqn.primitive.name == "dot_general"]
    assert {str(dot.invars[0].aval.dtype) for dot in dots} == {"float16"}


@pytest.mark.parametrize("name", ["data", "fsdp x tensor"])
def test_layouts_are_those_that_iso_shard_gives(name):
    plan = PLANS[name]
    model = on_meta(Mlp)
    step = training(model, adam(model))
    trace = traced(step, torch.empty(8, 32, device="meta"), plan=plan)
    real = iso.shard(Mlp(), iso.make_mesh((2, 4), ("data", "model")), plan)
    expected = {key: layout.spec for key, layout in iso.sharding_of(real).items()}
    specs = {leaf.name: leaf.sharding.spec for leaf in trace.inputs if leaf.role == "parameter"}
    assert specs == expected
    assert all(leaf.sharding.mesh is MESH or leaf.sharding.mesh == MESH for leaf in trace.inputs)


def constraints(trace):
    return [
        eqn.params["sharding"]
        for eqn in trace.program.eqns
        if eqn.primitive.name == "sharding_constraint"
    ]


def test_activations_of_the_plan():
    model = on_meta(Net)
    plan = Plan({"*": ()}, activations={"a": P("data", "model")}, inputs=P("data"))
    real = iso.make_mesh((2, 4), ("data", "model"))
    with xs.constrain_activations(model, real, plan):  # of training: on another mesh
        trace = traced(lambda x: model(x).mean().backward(), X, plan=plan)
        assert len(model.a._forward_hooks) == 1
    marked = [sharding for sharding in constraints(trace) if sharding.spec == P("data", "model")]
    assert len(marked) == 2 and {sharding.mesh for sharding in marked} == {MESH}


def test_marks_inside_are_meant_for_the_mesh_that_is_planned():
    mesh = xs.Mesh(range(8), (4, 2), ("data", "model"))
    model = on_meta(Net)

    def step(x):
        xs.mark_sharding(x, mesh, ("data", None))
        hidden = model.a(x)
        xs.mark_sharding(hidden, mesh, ("data", "model"))
        return model.b(hidden).sum()

    trace = traced(step, X, plan=None)
    assert {sharding.mesh for sharding in constraints(trace)} == {MESH}
    assert [leaf.sharding.spec for leaf in trace.inputs if leaf.name == "x"] == [P("data")]


def test_a_batch_on_any_device_and_tensors_that_the_step_stores():
    stored = []

    def step(x, y):
        stored.append((x + y).detach())
        xs.sync()

    trace = traced(step, torch.ones(8, 4), torch.ones(8, 4, device="jax"))
    assert stored == []
    assert [(leaf.name, leaf.sharding.spec) for leaf in trace.inputs] == [
        ("x", P("data")),
        ("y", P("data")),
    ]
    assert len(trace.results) == 1 and trace.results[0].replaces is None
