"""Steps of equal layers whose entries are traced once for all: the results are those of the CPU."""

from __future__ import annotations

import jax
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.compiling import rolled_plan, traced_entries
from isoshard.torch_bridge.engine.compiling.equation_templates import TemplateWriter
from isoshard.torch_bridge.engine.compiling.traced_lists import TracedLists
from isoshard.torch_bridge.engine.signatures import bound_op
from isoshard.torch_bridge.engine.signatures.bound_op import build_call
from isoshard.torch_bridge.engine.values.metas import Meta, Slot
from isoshard.torch_bridge.lowerings.registry import Lowering
from tests.torch_bridge.engine.capture.repeated_models import Training


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


def losses(layer, x, device, **options):
    """Of some steps of three layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer() for _ in range(3)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = xs.compile(repeat="always")(step) if device == "jax" else step
    return [run(x.to(device)).item() for _ in range(3)]


@pytest.mark.parametrize(
    ("layer", "size", "options"),
    [
        (Attention, (3, 5, 8), {"foreach": False, "amsgrad": True}),
        (Convolved, (2, 4, 6, 6), {}),
    ],
)
def test_layers_that_merge_or_move_axes_train_as_on_the_cpu(layer, size, options):
    x = torch.randn(size)
    want, got = (losses(layer, x, device, **options) for device in ("cpu", "jax"))
    assert got == pytest.approx(want, rel=1e-4)


def test_deeper_models_have_no_more_kinds(monkeypatch):
    """What is traced for a deeper model, with dropout, is what is traced for a shallow one."""
    found, trace = [], traced_entries.traced_entries
    monkeypatch.setattr(
        rolled_plan, "traced_entries", lambda *given: found.append(trace(*given)) or found[-1]
    )
    for layers in (3, 6):
        Training("always", dropout=0.3, layers=layers).run(1)
    (less, few), (more, many) = found
    assert len(few.eqns) == len(many.eqns) < len(less.eqns)
    assert len(more.eqns) > 1.5 * len(less.eqns)


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
    written = TracedLists(writer).write(0, call, [writer.typed(one) for one in inputs])
    assert written is None if mixed else len(written) == 3
    assert len(writer.program(inputs, ()).eqns) == (0 if mixed else 6)
