"""Layers as one loop lie as the same layers written out: the loop is not part of the plan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import isoshard as iso
from isoshard import Plan
from isoshard.planner.estimating import LOOPED, estimate
from isoshard.planner.plan_search.searched_step import searched
from isoshard.planner.traced.of_step import traced_step

LAYERS, WIDTH, HEADS, WORDS = 3, 64, 4, 1024
PLAN = Plan.fsdp("data", min_bytes=1024)


def attention(layer, x):
    split = (*x.shape[:2], HEADS, -1)
    q, k, v = [(x @ layer[name]).reshape(split) for name in "qkv"]
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ layer["o"]


def block(layer, x):
    x = x + attention(layer, x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5))
    return x + jax.nn.silu(x @ layer["up"]) @ layer["down"]


def loss(params, ids):
    x = params["embed"][ids]
    for layer in params["layers"]:
        x = jax.checkpoint(block)(layer, x)
    logits = jax.nn.log_softmax(x @ params["head"])
    return -jnp.mean(jnp.take_along_axis(logits, ids[..., None], -1))


def step(params, ids):
    value, grads = jax.value_and_grad(loss)(params, ids)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments():
    def struct(*shape):
        return jax.ShapeDtypeStruct(shape, "float32")

    layer = {name: struct(WIDTH, WIDTH) for name in "qkvo"}
    layer |= {"up": struct(WIDTH, 4 * WIDTH), "down": struct(4 * WIDTH, WIDTH)}
    params = {"embed": struct(WORDS, WIDTH), "layers": [layer] * LAYERS}
    params["head"] = struct(WIDTH, WORDS)
    return params, jax.ShapeDtypeStruct((8, 128), "int32")


def mesh_of(machine="cpu:8"):
    topology = iso.planner.topology(machine)
    return topology.mesh((topology.size,), ("data",))


def sent(report):
    found = {}
    for one in report.collectives:
        found[one.kind] = found.get(one.kind, 0) + one.bytes * one.count
    return found


def test_a_loop_sends_and_keeps_no_more_than_its_layers_written_out():
    """Nothing says how activations lie: the partitioner would choose otherwise in a loop."""
    how = {"depth": "partition", "progress": False}
    looped = estimate(step, arguments(), mesh_of(), PLAN, **how)
    written = estimate(step, arguments(), mesh_of(), PLAN, repeats=False, **how)
    assert sent(looped) == sent(written)
    assert LOOPED in looped.assumptions and LOOPED not in written.assumptions
    assert looped.memory.parameters == written.memory.parameters
    assert looped.memory.peak <= written.memory.peak
    assert looped.flops < 1.1 * written.flops


@pytest.mark.parametrize(("machine", "repeats"), [("v5e:2x4", True), ("cpu:8", False)])
def test_the_search_asks_the_partitioner_for_the_same_loops(machine, repeats):
    """Virtual devices run layers written out, and so the search tells them there."""
    mesh = mesh_of(machine)
    traced = traced_step(step, arguments(), {}, mesh, PLAN)
    found = searched(traced)
    assert found.looped is not found.written
    layouts = {one.name: one.sharding for one in traced.inputs}
    cost = found.cost(layouts, mesh, 1 << 40, depth="partition")
    how = {"depth": "partition", "progress": False, "repeats": repeats}
    report = estimate(step, arguments(), mesh, PLAN, **how)
    assert cost.memory == report.memory.peak
    assert cost.seconds == report.time.overlapped
