"""The program that planning traces is the one that training runs: collectives are equal."""

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.frameworks import require

from .steps import PLANS, Mlp, batch_for, batch_layout, compiled, llama, traffic, training


@pytest.fixture
def mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


ADAM, SGD = torch.optim.AdamW, torch.optim.SGD


@pytest.mark.parametrize(
    ("make", "plan", "optimizer"), [(Mlp, "fsdp x tensor", ADAM), (llama, "fsdp x tensor", SGD)]
)
def test_collectives_are_those_of_training(make, plan, optimizer, mesh):
    plan = PLANS[plan]
    with torch.device("meta"):
        model = make()
    step = training(model, optimizer(model.parameters(), lr=1e-3))
    trace = require("torch").traced_step(step, (batch_for(model),), {}, mesh, plan)
    planned = traffic(compiled(trace).as_text())

    real = make()
    iso.shard(real, mesh, plan)
    real_step = xs.compile(training(real, optimizer(real.parameters(), lr=1e-3)))
    batch = batch_layout(plan, batch_for(real, "cpu"), mesh)
    real_step(batch)
    assert planned == traffic(xs.program_text(real_step))
    assert planned
