"""The cost of a choice, against sums done by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from isoshard.core.traced.jax_steps import traced_jax_step
from isoshard.planner.costs import collective_times
from isoshard.planner.costs.roofline import COMPUTE_REACH
from isoshard.planner.machine.topologies import topology
from isoshard.planner.plan_search.analytic_cost import AnalyticCost, Choice
from isoshard.planner.plan_search.condensed_program import condensed
from isoshard.planner.plan_search.named_dimensions import named_dimensions

BATCH, WIDTH, INNER = 65536, 4096, 16384
MESH = topology("v5e:4x4").mesh((4, 4), ("data", "model"))
NONE = frozenset[int]()
UP = WIDTH * INNER * 4


def step(params, x):
    def loss(params):
        return jnp.sum((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


@pytest.fixture(scope="module")
def cost() -> AnalyticCost:
    args = (
        {
            "down": jax.ShapeDtypeStruct((INNER, WIDTH), "float32"),
            "up": jax.ShapeDtypeStruct((WIDTH, INNER), "float32"),
        },
        jax.ShapeDtypeStruct((BATCH, WIDTH), "float32"),
    )
    traced = traced_jax_step(step, args, {}, MESH)
    return AnalyticCost(condensed(traced, named_dimensions(traced)), MESH)


@pytest.fixture(scope="module")
def dims(cost) -> dict[str, int]:
    down, up, x = (group.dimensions for group in cost.program.dimensions.groups)
    assert down[0] == up[1] and x[1] == up[0]
    return {"batch": x[0], "inner": up[1], "embed": up[0], "out": down[1]}


def seconds(kind: str, sent: float, *axes: str) -> float:
    return collective_times.seconds(kind, int(sent), axes, MESH)


def test_alone_nobody_talks(cost):
    found = cost.of(Choice(((), ()), (NONE, NONE)))
    assert found.collectives == {}
    flops = cost.program.flops
    assert flops == 2.0 * BATCH * WIDTH * INNER * 5  # two forward; backward both weights' and h's
    assert found.busy >= flops / (topology("v5e:4x4").chip.rate("float32") * COMPUTE_REACH["tpu"])
    assert cost.least_seconds() <= found.seconds / 16


def test_a_split_batch_sums_gradients(cost, dims):
    found = cost.of(Choice(((dims["batch"],), ()), (NONE, NONE)))
    assert set(found.collectives) == {(0,)}
    wanted = 2 * seconds("all-reduce", UP, "data")
    assert found.collectives[0,] == pytest.approx(wanted, rel=0.05)
    both = cost.of(Choice(((dims["batch"],), (dims["batch"],)), (NONE, NONE)))
    wanted = 2 * seconds("all-reduce", UP, "data", "model")  # along both axes at once
    assert both.collectives[0, 1] == pytest.approx(wanted, rel=0.05)


def test_parameters_at_rest_are_gathered_and_gradients_scattered(cost, dims):
    both = frozenset({0, 1})
    found = cost.of(Choice(((dims["batch"],), ()), (both, NONE)))
    gathers = 3 * seconds("all-gather", UP, "data")  # up forward; down forward and backward
    scatters = 2 * seconds("reduce-scatter", UP, "data")
    assert found.collectives[0,] == pytest.approx(gathers + scatters, rel=0.05)
    alone = cost.of(Choice(((dims["batch"],), ()), (NONE, NONE)))
    assert found.memory < alone.memory - 2 * UP * 0.7


def test_features_split_as_megatron_does(cost, dims):
    found = cost.of(Choice(((), (dims["inner"],)), (NONE, NONE)))
    activations = BATCH * WIDTH * 4
    assert found.collectives[1,] == pytest.approx(
        seconds("all-reduce", activations, "model"), rel=0.05
    )
    assert cost.group_layout(0, Choice(((), (dims["inner"],)), (NONE, NONE))) == ((1,), ())
    both = cost.of(Choice(((dims["batch"],), (dims["inner"],)), (NONE, NONE)))
    assert both.busy < cost.of(Choice(((), ()), (NONE, NONE))).busy / 10
    assert both.collectives[0,] == pytest.approx(
        2 * seconds("all-reduce", UP / 4, "data"), rel=0.05
    )
