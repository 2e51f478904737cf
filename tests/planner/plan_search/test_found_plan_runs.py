"""A found plan on devices that are here: the same losses as on one."""

from __future__ import annotations

import jax
import numpy as np

import isoshard as iso
from benchmarks.planning_models import mlp
from isoshard.core.layout.axis_types import auto
from isoshard.planner.plan_search.searching import search


def filled(shapes, scale):
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: (scale * random.standard_normal(leaf.shape)).astype(leaf.dtype), shapes
    )


def test_losses_are_those_of_one_device():
    family = mlp(layers=2, width=64, batch=128)
    machine = iso.planner.topology("cpu:8").mesh((2, 4), ("data", "model"))
    found = search(family.step, family.args, machine)
    mesh = auto(iso.make_mesh((2, 4), ("data", "model")))
    params, batch = filled(family.args[0], 0.2), filled(family.args[2], 1.0)
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), family.args[1])
    laid = iso.shard(params, mesh, found.plan)
    laid_state = {name: iso.shard(one, mesh, found.plan) for name, one in state.items()}
    laid_batch = iso.shard(batch, mesh, found.plan.for_inputs())
    step = jax.jit(family.step)
    for _ in range(2):
        params, state, loss = step(params, state, batch)
        laid, laid_state, laid_loss = step(laid, laid_state, laid_batch)
        np.testing.assert_allclose(laid_loss, loss, rtol=2e-3)
