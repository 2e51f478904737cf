"""After a plan, and after one that failed, everything is as it was before."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import Plan
from isoshard.core.frameworks import require
from isoshard.core.runtime import metrics
from isoshard.planner.machine.topologies import topology
from isoshard.torch_bridge.engine.recording.random_state import STATE

MESH = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
PLAN = Plan.data_parallel("data")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32)
        self.drop, self.last = torch.nn.Dropout(0.5), torch.nn.Linear(32, 16)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.last(self.drop(self.norm(torch.relu(self.first(x)))))


class Trainer:
    """A training loop with all that a step may change."""

    def __init__(self, device):
        with torch.device("meta" if device == "meta" else "cpu"):
            self.model = Net()
        if device == "jax":
            self.model.to("jax")
        if device == "sharded":
            iso.shard(self.model, iso.make_mesh((2, 4), ("data", "model")), PLAN)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.25)
        self.steps, self.losses, self.last = 0, [], None
        self.fail = lambda: None

    def step(self, x):
        self.steps += 1
        self.optimizer.zero_grad()
        random.random(), np.random.rand()  # noqa: NPY002  (what old code does)
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= 0.5
        loss = self.model(x).square().mean()
        loss.backward()
        self.fail()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.model.eval()
        self.losses.append(loss.detach())
        self.last = loss
        self.fail()
        return loss


def state_of(trainer):
    """All of it, as what can be compared; tensors by identity, kind and elements."""
    model = trainer.model

    def snapshot(tensor):
        if tensor is None:
            return None
        elements = None if tensor.is_meta else tensor.detach().cpu().tolist()
        kind = (tensor.device, type(tensor), tensor.requires_grad, elements)
        return (id(tensor), *kind, snapshot(tensor.grad) if tensor.is_leaf else None)

    references = [
        (name, snapshot(tensor))
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in trainer.optimizer.param_groups
    ]
    state = {
        id(parameter): {kind: snapshot(value) for kind, value in slots.items()}
        for parameter, slots in trainer.optimizer.state.items()
    }
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return {
        "places": references,
        "groups": groups,
        "held": [id(p) for p in trainer.parameters],
        "given": [id(p) for g in trainer.optimizer.param_groups for p in g["params"]],
        "state": state,
        "hooks": hooks,
        "collects": gc.isenabled(),
        "python": (trainer.steps, list(trainer.losses), trainer.last, model.calls, model.training),
        "random": (random.getstate(), torch.get_rng_state().tolist(), STATE.position),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
    }


def plan(trainer, mesh=MESH):
    x = torch.empty(8, 16, device="meta")
    return require("torch").traced_step(trainer.step, (x,), {}, mesh, PLAN)


DEVICES = ("meta", "cpu", "jax", "sharded")


@pytest.mark.parametrize("device", DEVICES)
def test_after_a_plan(device):
    trainer = Trainer(device)
    xs.sync()
    before, counted = state_of(trainer), metrics.counters()
    trace = plan(trainer)
    assert {key: n for key, n in metrics.counters().items() if n} == {
        key: n for key, n in counted.items() if n
    }
    assert state_of(trainer) == before
    assert len(trace.modules) == 4


@pytest.mark.parametrize(
    ("device", "when", "error"),
    [("meta", 1, ValueError), ("jax", 2, KeyboardInterrupt), ("sharded", 1, KeyboardInterrupt)],
)
def test_after_an_error(device, when, error):
    trainer = Trainer(device)
    before = state_of(trainer)
    calls = []

    def fail():
        calls.append(1)
        if len(calls) == when:
            raise error("here")

    trainer.fail = fail
    with pytest.raises(error, match="here"):
        plan(trainer)
    trainer.fail = lambda: None
    assert state_of(trainer) == before


def test_a_captured_step_is_replayed_after_a_plan():
    model = torch.nn.Linear(4, 4).to("jax")
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)

    @xs.compile
    def step(x):
        sgd.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        sgd.step()
        return loss

    x = torch.ones(2, 4, device="jax")
    first = step(x).item()
    captures = metrics.counters()["captures"]
    traced = require("torch").traced_step(step, (x,), {}, MESH, None)
    assert step(x).item() < first
    assert metrics.counters()["captures"] == captures
    assert traced.name == "step"


def test_gradients_from_before_are_state():
    trainer = Trainer("cpu")
    trainer.model(torch.ones(8, 16)).sum().backward()
    before = state_of(trainer)
    trace = require("torch").traced_step(
        lambda x: trainer.model(x).square().mean().backward(),
        (torch.empty(8, 16),), {}, MESH, PLAN,
    )  # fmt: skip
    assert state_of(trainer) == before
    grads = {leaf.name: leaf.follows for leaf in trace.inputs if leaf.name.startswith("grad.")}
    assert grads["grad.first.weight"] == "first.weight" and len(grads) == 6
