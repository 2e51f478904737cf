"""Each equation of a traced step, forward and backward, comes from the user's line."""

import collections
import inspect
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import isoshard.torch_bridge as xs
from isoshard import Plan, make_mesh
from isoshard.core.frameworks import require
from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.traced.source_lines import said_by
from isoshard.core.runtime.jaxprs import equations

from .steps import Mlp, compiled, gpt2, training

MESH = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
SOURCE = inspect.getsourcelines(sys.modules[__name__])[0]
X = torch.empty(8, 16, device="meta")


def at(mark, function):
    """The line of this file with a mark in a comment, as reports have it."""
    (number,) = [n for n, text in enumerate(SOURCE, 1) if text.rstrip().endswith(f"# {mark}")]
    return f"test_lines.py:{number} ({function})"


def traced(step, *args, mesh=MESH, plan=None):
    return require("torch").traced_step(step, args, {}, mesh, plan)


def lines(found, primitive=None):
    """The lines of a program's equations, of one primitive: how many each has."""
    return collections.Counter(
        said_by(str(one.source_info.name_stack))
        for one in found.program.eqns
        if primitive in (None, one.primitive.name)
    )


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        h = self.a(x)  # first
        h = torch.tanh(h)  # tanh
        return self.b(h)  # second


def net():
    with torch.device("meta"):
        return Net()


def test_forward_backward_and_optimizer():
    model = net()
    adam = torch.optim.AdamW(model.parameters())

    def step(x):
        adam.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        adam.step()  # adam
        return loss

    found = traced(step, X)
    assert None not in lines(found)
    assert lines(found, "dot_general") == {
        at("first", "forward"): 2, at("second", "forward"): 3,
    }  # fmt: skip
    assert lines(found, "tanh") == {at("tanh", "forward"): 1}
    assert set(lines(found, "sqrt")) == {at("adam", "step")}
    assert set(lines(found)) >= {at("first", "forward"), at("adam", "step")}


def test_recomputation_is_where_the_model_is():
    model = net()

    def step(x):
        checkpoint(model, x, use_reentrant=False).square().mean().backward()

    assert lines(traced(step, X), "dot_general")[at("first", "forward")] == 3
    assert lines(traced(step, X), "tanh") == {at("tanh", "forward"): 2}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.sin(x)  # forward of my own

    @staticmethod
    def backward(ctx, gradient):
        return torch.cosh(gradient)  # backward of my own


def test_a_users_own_backward_has_its_line():
    weight = torch.nn.Parameter(torch.empty(16, device="meta"))

    def step(x):
        Doubled.apply(x * weight).mean().backward()

    found = traced(step, X)
    assert lines(found, "sin") == {at("forward of my own", "forward"): 1}
    assert lines(found, "cosh") == {at("backward of my own", "backward"): 1}


def test_a_view_in_between_takes_no_line_away():
    weight = torch.nn.Parameter(torch.empty(16, 8, device="meta"))

    def step(x):
        y = torch.sin(x @ weight)  # sine
        z = y.transpose(0, 1)
        return (z * 2).mean().backward()

    found = traced(step, X)
    assert lines(found, "cos") == {at("sine", "step"): 1}


def test_layers_that_are_a_loop():
    with torch.device("meta"):
        layers = torch.nn.ModuleList([Net() for _ in range(3)])
    loop = xs.scan_layers(layers)

    def step(x):
        loop(x).square().mean().backward()

    found = traced(step, X)
    assert "scan" in {one.primitive.name for one in found.program.eqns}
    inside = collections.Counter(
        said_by(str(one.source_info.name_stack))
        for one in equations(found.program.jaxpr)
        if one.primitive.name == "dot_general"
    )
    assert set(inside) == {at("first", "forward"), at("second", "forward")}


def test_a_librarys_model_is_the_user():
    with torch.device("meta"):
        model = gpt2()
    step = training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = traced(step, torch.empty(8, 32, dtype=torch.long, device="meta"))
    files = {line.partition(":")[0] for line in lines(found)}
    assert {"modeling_gpt2.py", "steps.py"} <= files
    assert not {"linear.py", "adam.py", "dispatch.py"} & files


def test_compiled_programs_carry_the_lines():
    with torch.device("meta"):
        model = Mlp()
    step = training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mesh = make_mesh((2, 4), ("data", "model"))
    found = traced(
        step, torch.empty(8, 32, device="meta"), mesh=mesh, plan=Plan.data_parallel("data")
    )
    text = compiled(found).as_text()
    reduced = [line for line in text.splitlines() if " all-reduce(" in line]
    assert reduced
    assert all("line:steps.py:" in line for line in reduced)


@pytest.mark.parametrize("depth", [1, 3])
def test_modules_are_marked(depth):
    with torch.device("meta"):
        model = torch.nn.Sequential(*[Net() for _ in range(depth)])
    found = traced(lambda x: model(x).sum().backward(), X)
    names = [one.params["name"] for one in found.program.eqns if one.primitive.name == "name"]
    # The gradient of the sum is one number, repeated: nothing to lay out.
    backward = [name for n in reversed(range(depth)) for name in (f"{n}.b,{n}", f"{n}.a")][1:]
    assert names == [
        *(f"module:{name}" for n in range(depth) for name in (f"{n}.a", f"{n}.b", f"{n}")),
        *(f"gradient:{name}" for name in backward),
    ]
    assert found.modules == tuple(
        name for n in range(depth) for name in (f"{n}", f"{n}.a", f"{n}.b")
    )
