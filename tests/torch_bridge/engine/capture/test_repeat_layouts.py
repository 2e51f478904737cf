"""A loop of a run lies as its layers written out: what a run sends and needs is what is planned."""

from __future__ import annotations

import collections

import jax
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import Plan, metrics
from isoshard.core.runtime.hlo_text import parsed
from isoshard.planner.programs.compiling import peak_of
from isoshard.planner.programs.device_ops import device_ops
from isoshard.planner.programs.hlo_liveness import liveness
from isoshard.torch_bridge.engine.recording.compile_settings import Settings
from isoshard.torch_bridge.recompute import checkpoint_module
from tests.jax_faults import OF_JAX_9
from tests.torch_bridge.autograd.test_recomputed_parameters import Block
from tools.harness.xla_flags import without_mlir

LAYERS, WIDTH, WORDS = 3, 64, 256
BATCH = Plan.batch_activations("data")
FSDP = Plan.fsdp("data", min_bytes=1024)


@pytest.fixture(autouse=True)
def _kernels_of_users(monkeypatch):
    """Programs are compiled as plans are: the kernels of conftest.py's flags need other buffers."""
    if without_mlir(jax.__version__):
        asked = Settings.compiler_options.fget
        users = {"xla_cpu_use_fusion_emitters": True}
        monkeypatch.setattr(Settings, "compiler_options", property(lambda one: asked(one) | users))


def step_of(model, repeat):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def step(ids):
        optimizer.zero_grad()
        scores = model(ids).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(scores, ids.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return xs.compile(step, repeat=repeat)


def made(device):
    torch.manual_seed(0)
    with torch.device(device):
        layers = [Block(WIDTH) for _ in range(LAYERS)]
        words, head = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS)
    for layer in layers:
        checkpoint_module(layer)
    return torch.nn.Sequential(words, torch.nn.Sequential(*layers), head)


def tokens():
    return torch.randint(WORDS, (8, 32), generator=torch.Generator().manual_seed(1))


def planned(plan):
    """Bytes by kind and axes, and the peak, by XLA's partitioner."""
    mesh = iso.planner.topology("cpu:8").mesh((8,), ("data",))
    ids = torch.empty(8, 32, dtype=torch.long, device="meta")
    how = {"depth": "partition", "progress": False}
    report = iso.planner.estimate(step_of(made("meta"), None), (ids,), mesh, plan, **how)
    sent = collections.Counter()
    for one in report.collectives:
        sent[one.kind, one.axes] += one.bytes * one.count
    return sent, report.memory.peak


def run(plan):
    """Losses; bytes by kind and axes, and the peak, of the compiled program."""
    mesh = iso.make_mesh((8,), ("data",))
    model = iso.shard(made("cpu"), mesh, plan)
    xs.constrain_activations(model, mesh, plan)
    ids = iso.shard(tokens(), mesh, plan.for_inputs())
    step = step_of(model, "always")
    losses = [step(ids).item() for _ in range(2)]
    module = parsed(step.last.program.compiled.as_text())
    sent = collections.Counter()
    for op in device_ops(module, mesh, liveness(module).at):
        if op.is_collective:
            sent[op.name, op.axes] += op.sent * op.times
    found = xs.memory_analysis(step)
    names = [f"{one}_size_in_bytes" for one in ("argument", "output", "alias", "temp")]
    return losses, sent, peak_of({name: getattr(found, name) for name in names})


def test_a_run_sends_and_needs_what_is_planned(counted):
    plan = FSDP * BATCH
    want_sent, want_peak = planned(plan)
    losses, sent, peak = run(plan)
    assert " layers as 2 loops" in metrics.report()
    assert dict(sent) == dict(want_sent)
    assert peak == pytest.approx(want_peak, rel=1e-2 if OF_JAX_9 else 1e-9)
    step = step_of(made("cpu"), None).step
    assert losses == pytest.approx([step(tokens()).item() for _ in losses], rel=1e-4)
