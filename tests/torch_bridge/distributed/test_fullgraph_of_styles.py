"""Parallel styles under `torch.compile(.., fullgraph=True)`: their hooks are nodes of one graph."""

from __future__ import annotations

import copy

import pytest
import torch

from isoshard.torch_bridge.distributed.tensor import Replicate, Shard, distribute_tensor, parallel
from tests.torch_bridge.distributed import tp_block
from tests.torch_bridge.distributed.graph_counting import BACKENDS, MARKS, compiled, data, graphs_of

pytestmark = MARKS

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def by_sequence():
    return tp_block.plan(parallel) | {
        "": parallel.PrepareModuleInput(input_layouts=R, desired_input_layouts=S1),
        "attention_norm": parallel.SequenceParallel(),
        "ffn_norm": parallel.SequenceParallel(),
        "attention.wo": parallel.RowwiseParallel(output_layouts=S1),
        "feed_forward.w2": parallel.RowwiseParallel(output_layouts=S1),
    }


def test_a_block_is_the_eager_one(mesh):
    torch.manual_seed(0)
    plain = tp_block.Block().double()
    model = copy.deepcopy(plain).to("jax")
    model = parallel.parallelize_module(model, mesh["tp"], by_sequence())
    run, counter = compiled(model, "isoshard")
    whole = data(tp_block.BATCH, tp_block.LENGTH, tp_block.WIDTH)
    want = plain(whole)
    want.square().mean().backward()
    x = distribute_tensor(whole, mesh, [S0, R])
    eager = model(x)
    got = run(x)
    got.square().mean().backward()
    torch.testing.assert_close(got.detach().cpu(), want.detach())
    assert got.placements == eager.placements
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, msg=name)
        assert mine.grad.placements == mine.placements
    assert graphs_of(counter) == 1


def test_training_compiles_once(mesh, counted):
    torch.manual_seed(0)
    styles = {"w1": parallel.ColwiseParallel(), "w2": parallel.RowwiseParallel()}
    model = tp_block.FeedForward().to("jax")
    model = parallel.parallelize_module(model, mesh["tp"], styles)
    plain = copy.deepcopy(model)
    losses, compilations = [], []
    for one in (compiled(model, "isoshard")[0], plain):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for seed in range(3):
            whole = data(tp_block.BATCH, tp_block.LENGTH, tp_block.WIDTH, seed=seed).float()
            optimizer.zero_grad()
            loss = one(distribute_tensor(whole, mesh, [S0, R])).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            compilations.append(counted("compilations"))
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-4)
    assert compilations[1] == compilations[2]


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x, scale):
        return self.layer(x) * scale, x


STYLES = {
    "input": lambda: parallel.PrepareModuleInput(
        input_layouts=R,
        desired_input_layouts=S0,
        input_kwarg_layouts={"scale": R},
        desired_input_kwarg_layouts={"scale": S1},
    ),
    "output": lambda: parallel.PrepareModuleOutput(
        output_layouts=(S0, None), desired_output_layouts=(S1, None)
    ),
    "both": lambda: parallel.PrepareModuleInputOutput(
        input_layouts=R,
        desired_input_layouts=S1,
        output_layouts=(R, R),
        desired_output_layouts=(S0, S1),
    ),
}


@pytest.mark.parametrize(("name", "backend"), [*zip(STYLES, BACKENDS, strict=True)])
def test_inputs_and_outputs_of_a_module(name, backend, mesh):
    module = parallel.parallelize_module(Pair().double().to("jax"), mesh["tp"], STYLES[name]())
    x, scale = data(8, 8).to("jax"), data(8, 8, seed=1).to("jax")
    run, counter = compiled(module, backend)
    results = []
    for one in (module, run, run):
        module.zero_grad()
        out, same = one(x, scale=scale)
        (out * same).sum().backward()
        numbers = [t.detach().cpu() for t in (out, same, module.layer.weight.grad)]
        results.append((numbers, out.placements, same.placements))
    for numbers, *placements in results[1:]:
        torch.testing.assert_close(numbers, results[0][0])
        assert placements == list(results[0][1:])
    assert graphs_of(counter) == 1


def test_what_a_style_refuses(mesh):
    style = parallel.PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(S0, S0))
    module = parallel.parallelize_module(torch.nn.ReLU(), mesh["tp"], style)
    x = data(8, 8).to("jax")
    with pytest.raises(ValueError, match="ReLU has 1 inputs, and input_layouts has 2 entries"):
        torch.compile(module, backend="aot_eager")(x)
