"""The main job: a transformer trains on a (2, 4) mesh as on the CPU, as one program."""

from __future__ import annotations

import dataclasses

import chex
import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

import isoshard as iso
import isoshard.torch_bridge as xs
from benchmarks import collectives
from benchmarks.by_hand import models
from benchmarks.by_hand.step import Training, make_mesh
from benchmarks.models import gpt2
from isoshard.core.runtime import metrics

STEPS = 4
WORK = gpt2.problem(gpt2.Size(layers=1, width=96, vocabulary=128, length=32))
PLAN = iso.Plan([(pattern, P(*spec)) for pattern, spec in WORK.specs], default=P())


@dataclasses.dataclass
class Run:
    """What the compiled steps gave."""

    losses: list[float]
    step: xs.CompiledStep
    compilations: list[int]
    module: torch.nn.Module
    mesh: jax.sharding.Mesh


def _train(module, optimizer, schedule, step, batches) -> list[float]:
    losses = []
    for batch in batches:
        losses.append(float(step(*batch)))
        schedule.step()
    return losses


def _schedule(optimizer: torch.optim.Optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


@pytest.fixture(scope="module")
def run() -> Run:
    mesh = make_mesh()
    module = iso.shard(WORK.module(), mesh, PLAN)
    optimizer = WORK.optimizer(module.parameters())
    schedule = _schedule(optimizer)
    step = xs.compile(lambda *batch: WORK.step(module, optimizer, *batch))
    before = len(metrics.compilations())
    losses, counts = [], []
    for number in range(STEPS):
        batch = tuple(iso.shard(x, mesh, P("data")) for x in WORK.tensors(number))
        losses.append(float(step(*batch)))
        schedule.step()
        counts.append(len(metrics.compilations()) - before)
    return Run(losses, step, counts, module, mesh)


def test_the_loss_curve_is_that_of_cpu_torch(run):
    torch.set_num_threads(1)  # beside eight busy devices, more threads wait for each other
    module = WORK.module()
    optimizer = WORK.optimizer(module.parameters())
    batches = [WORK.tensors(number) for number in range(STEPS)]
    losses = _train(
        module,
        optimizer,
        _schedule(optimizer),
        lambda *batch: WORK.step(module, optimizer, *batch),
        batches,
    )
    np.testing.assert_allclose(run.losses, losses, rtol=1e-4)
    assert losses[-1] < losses[0]
    trained = {name: p.detach().numpy() for name, p in module.named_parameters()}
    chex.assert_trees_all_close(iso.jax_function(run.module).params, trained, rtol=1e-2, atol=1e-4)


def test_one_program_and_no_recompilation(run):
    assert len(run.step.replays) == 1
    assert run.compilations == [1] * STEPS


def test_its_collectives_are_those_of_the_hand_written_jax_step(run):
    by_hand = Training(models.by_hand(WORK), run.mesh).compiled
    theirs = collectives.summarize(by_hand.as_text())
    ours = collectives.summarize(xs.program_text(run.step))
    assert ours == theirs
    assert theirs  # a program without collectives would prove nothing
    memory, other = xs.memory_analysis(run.step), by_hand.memory_analysis()
    assert _peak(memory) <= 1.15 * _peak(other)


def _peak(analysis) -> int:
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def test_parameters_keep_their_layout_and_state_follows(run):
    layouts = iso.sharding_of(run.module)
    for name, parameter in run.module.named_parameters():
        assert layouts[name].spec == PLAN.spec_for(name, tuple(parameter.shape), run.mesh)
        assert iso.to_jax(parameter).sharding.is_equivalent_to(layouts[name], parameter.dim())
