"""Plans traced once for entries that compute the same: the program is that of each entry traced."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import isoshard.torch_bridge as xs
from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.repeats.inlined_calls import inlined
from isoshard.torch_bridge.engine.compiling import rolled_plan, traced_entries
from isoshard.torch_bridge.engine.compiling.equation_templates import TemplateWriter
from isoshard.torch_bridge.engine.compiling.plan_lowering import computed
from isoshard.torch_bridge.engine.compiling.traced_lists import TracedLists
from isoshard.torch_bridge.engine.recording import random_state
from isoshard.torch_bridge.engine.signatures import bound_op
from isoshard.torch_bridge.engine.signatures.bound_op import build_call
from isoshard.torch_bridge.engine.values.metas import Meta, Slot
from isoshard.torch_bridge.lowerings.registry import Lowering
from tests.torch_bridge.engine.capture.repeated_models import Training


def one_by_one(plan, arguments):
    """The program with each entry traced."""
    leaves, floats = len(plan.leaves), len(plan.leaves) + plan.lifted

    def step(*given):
        keys = map(random_state.key_of, given[floats:])
        return computed(plan, given[:leaves], given[leaves:floats], keys)

    return jax.make_jaxpr(step)(*arguments)


def terms(program, known: dict[Any, int]) -> list[int]:
    """A number for each result: equal ones are the same expression of inputs."""
    flow = EquationFlow.of(inlined(program))
    made = [("input", number, str(flow.avals[number])) for number in range(flow.inputs)]
    made += [("constant", str(one)) for one in program.consts]
    names = [known.setdefault(one, len(known)) for one in made]

    def name(operand):
        if operand >= 0:
            return names[operand]
        return flow.literal(operand).tobytes(), str(flow.aval(operand))

    for equation, operands, outputs in zip(
        flow.equations, flow.operands, flow.outputs, strict=True
    ):
        said = re.sub(r"0x[0-9a-f]+", "", str(sorted(equation.params.items())))
        avals = str([one.aval for one in equation.outvars])
        key = (equation.primitive.name, said, avals, tuple(map(name, operands)))
        names += [known.setdefault((key, n), len(known)) for n in range(len(outputs))]
    return [known.setdefault(name(one), len(known)) for one in flow.results]


@pytest.fixture
def traced(monkeypatch):
    """Each plan that is traced: the program, that of each entry traced, and the kinds."""
    found = []

    def both(plan, arguments):
        program, kinds = traced_entries.traced_entries(plan, arguments)
        found.append((program, one_by_one(plan, arguments), kinds))
        return program, kinds

    monkeypatch.setattr(rolled_plan, "traced_entries", both)
    return found


def assert_same(traced):
    known: dict[Any, int] = {}
    assert traced
    for program, whole, kinds in traced:
        assert terms(program, known) == terms(whole, known)
        assert program.in_avals == whole.in_avals and program.out_avals == whole.out_avals
        assert len(kinds.eqns) < len(program.eqns)


class Attention(nn.Module):
    """Heads whose products torch merges into one batch axis, and rows into one."""

    def __init__(self):
        super().__init__()
        self.queries, self.out = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        q, k, v = self.queries(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class Convolved(nn.Module):
    """A convolution and a norm of images, which are computed with channels last."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return x + F.relu(self.norm(self.convolution(x)))


def train(layer, x, **options):
    """One step of four layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer() for _ in range(4)]).to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)

    @xs.compile(repeat="always")
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step(x.to("jax")).item()


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"amsgrad": True}])
def test_products_of_merged_axes(traced, options):
    train(Attention, torch.randn(3, 5, 8), **options)
    assert_same(traced)


def test_images_with_channels_last(traced):
    train(Convolved, torch.randn(2, 4, 6, 6))
    assert_same(traced)


def test_random_words_and_learning_rates(traced):
    training = Training("always", dropout=0.3)
    training.run(2)
    assert_same(traced)


def test_deeper_models_have_no_more_kinds(traced):
    for layers in (3, 9):
        Training("always", layers=layers).run(1)
    few, many = (len(kinds.eqns) for _, _, kinds in traced)
    assert few == many
    assert len(traced[1][0].eqns) > 2 * len(traced[0][0].eqns)


@pytest.mark.parametrize("mixed", [False, True])
def test_elements_computed_of_one_another_stay_together(monkeypatch, mixed):
    def add(tensors, numbers):
        return [x + (tensors[0] if mixed else x) * n for x, n in zip(tensors, numbers, strict=True)]

    monkeypatch.setattr(bound_op.registry, "find", lambda op: Lowering("add", add))
    metas = (Meta((2,), (1,), torch.float32),) * 3
    given = [Slot(0), Slot(1), Slot(2)], [1.0, 2.0, 2.0]  # two kinds of elements
    call = build_call(torch.ops.aten._foreach_add.ScalarList, given, {}, metas, outs=metas)
    writer = TemplateWriter()
    inputs = jax.make_jaxpr(lambda *x: x)(*[jax.ShapeDtypeStruct((2,), "float32")] * 3).jaxpr.invars
    written = TracedLists(writer).write(0, call, [writer.known(one) for one in inputs])
    assert written is None if mixed else len(written) == 3
    assert len(writer.program(inputs, ()).eqns) == (0 if mixed else 6)
