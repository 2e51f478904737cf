"""Plans found for steps of torch: no weights, rules that resolve, costs as `estimate` tells."""

from __future__ import annotations

import pytest
import torch

import isoshard as iso
from isoshard.core.planner.estimating import estimate
from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.plan_search.searching import search


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Tiny(torch.nn.Module):
    def __init__(self, width: int = 1024, layers: int = 2, words: int = 8192) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.layers = torch.nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = torch.nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def training():
    with torch.device("meta"):
        model = Tiny()
        tokens = torch.empty(32, 128, dtype=torch.long)
    adam = torch.optim.AdamW(model.parameters())

    def step(tokens: torch.Tensor) -> torch.Tensor:
        adam.zero_grad()
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        adam.step()
        return loss

    return model, step, (tokens,)


def test_a_plan_is_found_and_costs_what_estimate_tells(training):
    model, step, args = training
    mesh = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
    found = search(step, args, mesh, candidates=2)
    assert not found.plan.resolve(model, mesh, strict=True).unmatched
    report = estimate(step, args, mesh, found.plan)
    assert report.memory.peak == found.cost.memory
    assert report.time.overlapped == pytest.approx(found.cost.seconds, rel=1e-6)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_plan_auto_keeps_rules_of_ones_own(training):
    model, step, args = training
    mesh = topology("v5e:2x4").mesh((8,), ("model",))
    own = iso.Plan({"*.up.weight": ("model",)})
    plan = iso.Plan.auto(step, args, mesh, fixed=own)
    assert plan.rules[0] == ("*.up.weight", ("model",))
    specs = plan.resolve(model, mesh).specs
    assert specs["layers.1.up.weight"] == iso.P("model")
