"""Training on two slices of four devices: a decoder under plans, in numbers."""

from __future__ import annotations

import collections

import jax
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import Plan, PlanError
from tests.core.plan.test_twins import LENGTH, VOCABULARY, TorchGPT2

RATE, BATCH, STEPS = 0.1, 16, 2
HSDP = Plan.data_parallel("replica") * Plan.fsdp("data", min_bytes=0)
SCALAR = 64
"""Bytes up to which a collective is the loss, or its number of tokens."""


def tokens():
    return np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)


def torch_model():
    torch.manual_seed(0)
    return TorchGPT2()


def torch_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step(ids):
        optimizer.zero_grad()
        logits = model(ids)[:, :-1].reshape(-1, VOCABULARY)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].reshape(-1).long())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.fixture(scope="module")
def reference():
    """Losses and parameters of one device, float64."""
    model = torch_model().double()
    step = torch_step(model)
    losses = [float(step(torch.from_numpy(tokens()))) for _ in range(STEPS)]
    return losses, {name: one.detach().numpy() for name, one in model.named_parameters()}


def run_torch(mesh, plan):
    model = iso.shard(torch_model(), mesh, plan)
    if any(part.activations for part in plan.factors):
        xs.constrain_activations(model, mesh, plan)
    step = xs.compile(torch_step(model))
    batch = iso.shard({"ids": torch.from_numpy(tokens())}, mesh, plan.for_inputs())["ids"]
    losses = [float(step(batch)) for _ in range(STEPS)]
    return losses, xs.program_text(step), model


def test_only_sums_of_gradients_go_from_slice_to_slice(reference, tmp_path):
    ici, dcn, axes, plan = (4, 1), (1, 2), ("data", "replica"), HSDP  # the minor axis
    mesh = iso.hybrid_mesh(ici, dcn, axes)
    assert iso.sharding.slice_axes(mesh, slices=2) == {"replica": 2}
    plan = plan * Plan(dcn={"replica": "all-reduce"})
    losses, program, model = run_torch(mesh, plan)
    np.testing.assert_allclose(losses, reference[0], rtol=2e-6)
    found = iso.planner.check_crossings(program, mesh, plan, slices=2)
    assert {one.kind for one in found} == {"all-reduce"}
    with pytest.raises(PlanError, match=r"all-reduce over .*replica.*2 slices"):
        iso.planner.check_crossings(program, mesh, Plan(), slices=2)
    gradients_are_sent_split_by_the_devices_of_a_slice(program, mesh, reference[1])
    what_was_saved_goes_on_without_slices(tmp_path, model, reference[1])


def gradients_are_sent_split_by_the_devices_of_a_slice(program, mesh, parameters):
    sums = [one for one in iso.planner.crossings(program, mesh, slices=2) if one.bytes > SCALAR]
    sent = collections.Counter[bool]()
    for one in sums:
        sent[one.axes == ("replica",)] += one.bytes * one.count
    bytes_of = {name: 4 * one.size for name, one in parameters.items()}
    weights = {name for name, one in parameters.items() if one.ndim == 2} - {"wpe.weight"}
    assert sent[True] == sum(bytes_of[name] for name in weights) // 4
    # XLA's CPU backend sums along both axes at once, and slices: biases, norms, positions, and the
    # rows of the tied table that were looked up. The loss may be sent with them.
    rest = sum(size for name, size in bytes_of.items() if name not in weights)
    assert sent[False] - rest - bytes_of["wte.weight"] in (0, 4)


def what_was_saved_goes_on_without_slices(folder, model, parameters):
    iso.save(folder / "run", model)
    other = iso.shard(torch_model(), iso.make_mesh((4,), ("data",)), Plan.fsdp("data", min_bytes=0))
    iso.restore(folder / "run", other)
    for name, one in other.named_parameters():
        np.testing.assert_allclose(
            np.asarray(iso.full(one).detach()), parameters[name], atol=2e-6, err_msg=name
        )


def test_a_whole_axis_of_fsdp_over_slices_is_told(reference, stacks):
    mesh = iso.hybrid_mesh((4,), (2,), ("data",))
    plan = Plan.fsdp("data", min_bytes=0) * Plan(dcn={"data": "all-reduce"})
    losses, program, _ = run_torch(mesh, plan)
    np.testing.assert_allclose(losses, reference[0], rtol=2e-6)
    line = "" if jax.config.jax_traceback_in_locations_limit < 100 else ", test_"  # JAX 0.9: 10
    with pytest.raises(PlanError, match=rf"all-gather over data, 2 slices: .* a device{line}"):
        iso.planner.check_crossings(program, mesh, plan, slices=2)
