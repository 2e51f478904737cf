"""The cost of a choice, against sums done by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks.planning_models import llama
from isoshard.core.planner.costs import collective_times
from isoshard.core.planner.costs.roofline import COMPUTE_REACH
from isoshard.core.planner.machine import chips
from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.plan_search.analytic_cost import AnalyticCost, Choice
from isoshard.core.planner.plan_search.condensed_program import condensed
from isoshard.core.planner.plan_search.named_dimensions import named_dimensions
from isoshard.core.planner.traced.jax_steps import traced_jax_step

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
    assert found.talking == {}
    flops = cost.program.flops
    assert flops == 2.0 * BATCH * WIDTH * INNER * 5  # two forward; backward both weights' and h's
    assert found.busy >= flops / (topology("v5e:4x4").chip.rate("float32") * COMPUTE_REACH["tpu"])
    assert cost.least_seconds() <= found.seconds / 16


def test_a_split_batch_sums_gradients(cost, dims):
    found = cost.of(Choice(((dims["batch"],), ()), (NONE, NONE)))
    assert set(found.talking) == {(0,)}
    wanted = 2 * seconds("all-reduce", UP, "data")
    assert found.talking[0,] == pytest.approx(wanted, rel=0.05)


def test_along_both_axes_they_are_summed_at_once(cost, dims):
    found = cost.of(Choice(((dims["batch"],), (dims["batch"],)), (NONE, NONE)))
    wanted = 2 * seconds("all-reduce", UP, "data", "model")
    assert found.talking[0, 1] == pytest.approx(wanted, rel=0.05)


def test_parameters_at_rest_are_gathered_and_gradients_scattered(cost, dims):
    both = frozenset({0, 1})
    found = cost.of(Choice(((dims["batch"],), ()), (both, NONE)))
    gathers = 3 * seconds("all-gather", UP, "data")  # up forward; down forward and backward
    scatters = 2 * seconds("reduce-scatter", UP, "data")
    assert found.talking[0,] == pytest.approx(gathers + scatters, rel=0.05)
    alone = cost.of(Choice(((dims["batch"],), ()), (NONE, NONE)))
    assert found.memory < alone.memory - 2 * UP * 0.7


def test_features_split_as_megatron_does(cost, dims):
    found = cost.of(Choice(((), (dims["inner"],)), (NONE, NONE)))
    activations = BATCH * WIDTH * 4
    assert found.talking[1,] == pytest.approx(seconds("all-reduce", activations, "model"), rel=0.05)
    assert cost.group_layout(0, Choice(((), (dims["inner"],)), (NONE, NONE))) == ((1,), ())


def test_both_are_the_product(cost, dims):
    choice = Choice(((dims["batch"],), (dims["inner"],)), (NONE, NONE))
    found = cost.of(choice)
    whole = cost.of(Choice(((), ()), (NONE, NONE)))
    assert found.busy < whole.busy / 10
    assert found.talking[0,] == pytest.approx(2 * seconds("all-reduce", UP / 4, "data"), rel=0.05)


def test_temporaries_that_are_new_in_each_step_take_time(cost, dims, monkeypatch):
    """As much time as `costs.roofline` gives the traced program; what rests between steps none."""
    choice = Choice(((dims["batch"],), ()), (NONE, NONE))
    resting = cost.program.rest + sum(cost.program.resting[:2]) + cost.program.resting[2] / 4
    held = cost.of(choice).memory - resting

    def seconds_if_kept(kept: int, fresh: float = 1e9) -> float:
        chip = dataclasses.replace(chips.chip("cpu"), name="paged", fresh=fresh, kept=kept)
        monkeypatch.setitem(chips._CHIPS, "paged", chip)
        mesh = topology("paged:16").mesh((4, 4), ("data", "model"))
        found = AnalyticCost(cost.program, mesh).of(choice)
        return found.seconds

    none = seconds_if_kept(0, fresh=0.0)
    assert seconds_if_kept(int(held) + 1) == none
    assert seconds_if_kept(int(held) - 1) - none == pytest.approx(held / 1e9)


def test_what_does_not_divide_stays_whole(dims):
    args = (
        {"w": jax.ShapeDtypeStruct((6, 10), "float32")},
        jax.ShapeDtypeStruct((6, 6), "float32"),
    )

    def small(params, x):
        return jax.grad(lambda p: jnp.sum(x @ p["w"]))(params)

    traced = traced_jax_step(small, args, {}, MESH)
    cost = AnalyticCost(condensed(traced, named_dimensions(traced)), MESH)
    every = tuple(range(3))
    choice = Choice((every, every), (frozenset({0}), frozenset({0})))
    assert cost.group_layout(0, choice) == ((), ())


def test_few_heads_are_split_by_a_part_of_an_axis():
    """Two heads of keys over eight devices: two of them split heads, the others their elements."""
    family = llama(
        layers=1, width=512, inner=1024, heads=8, kv_heads=2, vocabulary=512, batch=8, length=128
    )
    mesh = topology("v5e:4x4").mesh((2, 8), ("data", "model"))
    traced = traced_jax_step(family.step, family.args, {}, mesh)
    cost = AnalyticCost(condensed(traced, named_dimensions(traced)), mesh)
    groups = {one.names[0]: one.dimensions for one in cost.program.dimensions.groups}
    (batch, _), (heads, _) = groups["batch.tokens"], groups["layers.0.self_attn.k_proj.weight"]
    choice = Choice(((batch,), (heads,)), (NONE, NONE))
    lies = {
        kind.shape: cost._known[cost._value(number, kind, choice, [])]
        for number, kind in enumerate(cost.program.values)
        if kind.group < 0
    }
    keys, queries, scores = (8, 128, 2, 64), (8, 128, 2, 4, 64), (8, 2, 4, 128, 128)
    assert lies[keys] == ((0,), (), (1,), (2, 3))
    assert lies[queries] == ((0,), (), (1,), (2, 3), ())
    assert lies[scores] == ((0,), (1,), (2, 3), (), ())
    whole = cost.of(Choice(((batch,), ()), (NONE, NONE)))
    split = cost.of(choice)
    assert split.busy < 0.8 * whole.busy
