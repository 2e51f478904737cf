"""A step with loops holds and moves the same bytes as the step it was made of."""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import make_mesh
from isoshard.core.runtime.hlo_collectives import collectives as hlo_collectives
from isoshard.core.traced.traced_step import StepInput, StepResult, TracedStep
from isoshard.planner.traced.rolled_step import rolled_step

WIDTH = 32
SPECS = {"embed": P(), "up": P(None, "model"), "down": P("model", None), "bias": P("model")}
FULLY = {
    "embed": P(),
    "up": P("data", "model"),
    "down": P("model", "data"),
    "bias": P(("model", "data")),
}
SHAPES = {
    "embed": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
    "bias": (4 * WIDTH,),
}


def _loss(params, x, rows):
    x = jax.lax.with_sharding_constraint(x @ params["embed"], rows)
    for layer in params["layers"]:
        hidden = jnp.tanh(x @ layer["up"] + layer["bias"])
        x = jax.lax.with_sharding_constraint(x + hidden @ layer["down"], rows)
    return jnp.mean(x * x)


def _step(params, moments, x, rows):
    loss, grads = jax.value_and_grad(_loss)(params, x, rows)
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, grads)
    params = jax.tree.map(lambda p, m: p - 0.01 * m / (1.0 + jnp.abs(m)), params, moments)
    return params, moments, loss


def traced(depth: int, odd: int | None = None, specs=SPECS) -> TracedStep:
    """A training step of residual blocks on a (2, 4) mesh; one may be laid out differently."""
    mesh = make_mesh((2, 4), ("data", "model"), axis_types=AxisType.Auto)
    struct = {key: jax.ShapeDtypeStruct(shape, np.float32) for key, shape in SHAPES.items()}
    x = jax.ShapeDtypeStruct((16, WIDTH), np.float32)
    layer = {key: struct[key] for key in ("bias", "down", "up")}
    params = {"embed": struct["embed"], "layers": [layer] * depth}
    rows = NamedSharding(mesh, P("data"))
    program = jax.make_jaxpr(functools.partial(_step, rows=rows))(params, params, x)
    names = ["embed", *(f"layers.{one}.{key}" for one in range(depth) for key in layer)]
    inputs = []
    for kind in ("", "momentum."):
        for name in names:
            key = name.split(".")[-1]
            spec = P() if name == f"layers.{odd}.up" else specs[key]
            inputs.append(
                StepInput(
                    kind + name,
                    "optimizer" if kind else "parameter",
                    SHAPES[key],
                    np.dtype(np.float32),
                    NamedSharding(mesh, spec),
                    name if kind else None,
                )
            )
    results = [StepResult(one.name, number, one.sharding) for number, one in enumerate(inputs)]
    inputs.append(StepInput("x", "input", x.shape, np.dtype(np.float32), rows))
    results.append(StepResult("loss"))
    return TracedStep("step", "jax", program, tuple(inputs), tuple(results), mesh)


def _compiled(step: TracedStep):
    function = jax.jit(
        jaxpr_as_fun(step.program),
        in_shardings=[one.sharding for one in step.inputs],
        out_shardings=[one.sharding for one in step.results],
        donate_argnums=[one.replaces for one in step.results if one.replaces is not None],
    )
    structs = [
        jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=one.sharding) for one in step.inputs
    ]
    return function.lower(*structs).compile()


def moved(text: str) -> collections.Counter[str]:
    """Bytes of each kind of collective in an HLO module, those in loops once for each iteration."""
    found: collections.Counter[str] = collections.Counter()
    for one in hlo_collectives(text):
        found[one.kind] += one.bytes * one.times
    return found


def test_bytes_held_and_moved_are_those_of_the_unrolled_step():
    step = traced(5, specs=FULLY)
    short = traced(2)
    assert rolled_step(short) is short  # nothing repeats
    looped = rolled_step(step)
    unrolled, rolled = _compiled(step), _compiled(looped)
    assert len(looped.program.eqns) < len(step.program.eqns) / 2
    one, other = unrolled.memory_analysis(), rolled.memory_analysis()
    assert other.argument_size_in_bytes == one.argument_size_in_bytes
    assert other.alias_size_in_bytes == one.alias_size_in_bytes
    assert moved(rolled.as_text()) == moved(unrolled.as_text())


def test_a_stack_knows_its_layers_and_is_laid_out_like_them():
    step = traced(4)
    looped = rolled_step(step)
    up = next(one for one in looped.inputs if one.name == "layers.*.up")
    assert up.layers == tuple(f"layers.{n}.up" for n in range(4))
    assert (up.layer_name, up.layer_shape) == ("layers.0.up", SHAPES["up"])
    rows = NamedSharding(looped.mesh, P("data", "model"))
    again = looped.resharded({f"layers.{n}.up": rows for n in range(4)})
    layouts = {one.name: one.sharding.spec for one in again.inputs}
    assert layouts["layers.*.up"] == layouts["momentum.layers.*.up"] == P(None, "data", "model")
    assert layouts["layers.*.down"] == P(None, *SPECS["down"])
    assert again.results[7].sharding.spec == P(None, "data", "model")


def test_a_layer_that_is_laid_out_differently_stays_outside():
    looped = rolled_step(traced(6, odd=5))
    stacked = [one for one in looped.inputs if "*" in one.name]
    assert {one.shape[0] for one in stacked} == {5}
    assert {one.sharding.spec for one in looped.inputs if one.name == "layers.5.up"} == {P()}


def test_the_same_numbers():
    depth = 4
    step = traced(depth)
    looped = rolled_step(step)
    draw = np.random.default_rng(0)
    values = {one.name: draw.standard_normal(one.shape, np.float32) for one in step.inputs}

    def given(one: StepInput):
        if one.name in values:
            return values[one.name]
        return np.stack([values[one.name.replace("*", str(layer))] for layer in range(depth)])

    plain = [dataclasses.replace(one, replaces=None) for one in step.results]
    wanted = dict(
        zip(
            [one.name for one in plain],
            _compiled(dataclasses.replace(step, results=tuple(plain)))(
                *[jax.device_put(values[one.name], one.sharding) for one in step.inputs]
            ),
            strict=True,
        )
    )
    got = _compiled(looped)(*[jax.device_put(given(one), one.sharding) for one in looped.inputs])
    for result, value in zip(looped.results, got, strict=True):
        rows = value if "*" in result.name else [value]
        for layer, row in enumerate(rows):
            name = result.name.replace("*", str(layer))
            np.testing.assert_allclose(row, wanted[name], rtol=2e-5, atol=1e-6)
