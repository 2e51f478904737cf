"""Each equation of a traced step, forward and backward, comes from the user's line."""

import collections
import inspect
import sys

import torch

from isoshard import Plan, make_mesh
from isoshard.core.frameworks import require
from isoshard.core.traced.source_lines import line_in
from isoshard.planner.machine.topologies import topology

from .steps import Mlp, compiled, training

MESH = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
SOURCE = inspect.getsourcelines(sys.modules[__name__])[0]
X = torch.empty(8, 16, device="meta")


def at(mark, function):
    """The line of this file with a mark in a comment, as reports have it."""
    (line,) = [n for n, text in enumerate(SOURCE, 1) if text.rstrip().endswith(f"# {mark}")]
    return f"test_lines.py:{line} ({function})"


def traced(step, *args, mesh=MESH, plan=None):
    return require("torch").traced_step(step, args, {}, mesh, plan)


def lines(trace, primitive=None):
    """The lines of a program's equations, of one primitive: how many each has."""
    return collections.Counter(
        line_in(str(eqn.source_info.name_stack))
        for eqn in trace.program.eqns
        if primitive in (None, eqn.primitive.name)
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

    trace = traced(step, X)
    assert None not in lines(trace)
    assert lines(trace, "dot_general") == {
        at("first", "forward"): 2, at("second", "forward"): 3,
    }  # fmt: skip
    assert lines(trace, "tanh") == {at("tanh", "forward"): 1}
    assert set(lines(trace, "sqrt")) == {at("adam", "step")}
    assert set(lines(trace)) >= {at("first", "forward"), at("adam", "step")}


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

    trace = traced(step, X)
    assert lines(trace, "sin") == {at("forward of my own", "forward"): 1}
    assert lines(trace, "cosh") == {at("backward of my own", "backward"): 1}


def test_compiled_programs_carry_the_lines(stacks):
    with torch.device("meta"):
        model = Mlp()
    step = training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mesh = make_mesh((2, 4), ("data", "model"))
    trace = traced(
        step, torch.empty(8, 32, device="meta"), mesh=mesh, plan=Plan.data_parallel("data")
    )
    text = compiled(trace).as_text()
    reduced = [line for line in text.splitlines() if " all-reduce(" in line]
    assert reduced
    assert all("/steps.py:" in line for line in reduced)


def test_modules_are_marked():
    depth = 3
    with torch.device("meta"):
        model = torch.nn.Sequential(*[Net() for _ in range(depth)])
    trace = traced(lambda x: model(x).sum().backward(), X)
    names = [eqn.params["name"] for eqn in trace.program.eqns if eqn.primitive.name == "name"]
    # The gradient of the sum is one number, repeated: nothing to lay out.
    backward = [name for n in reversed(range(depth)) for name in (f"{n}.b,{n}", f"{n}.a")][1:]
    assert names == [
        *(f"module:{name}" for n in range(depth) for name in (f"{n}.a", f"{n}.b", f"{n}")),
        *(f"gradient:{name}" for name in backward),
    ]
    assert trace.modules == tuple(
        name for n in range(depth) for name in (f"{n}", f"{n}.a", f"{n}.b")
    )
