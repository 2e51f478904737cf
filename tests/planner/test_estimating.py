"""`iso.planner.estimate`: the three depths of one step, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import isoshard as iso
from isoshard import P, Plan
from isoshard.core.errors import ShardingError
from isoshard.core.plan import PlanError
from isoshard.core.runtime.formatting import human_bytes
from isoshard.core.runtime.hlo_collectives import collectives
from isoshard.planner.estimating import LOOPED, estimate
from isoshard.planner.machine.topologies import topology

LAYERS, WIDTH = 6, 256
PLAN = Plan(
    {"layers.*[024].w": (None, "model"), "layers.*[135].w": ("model", None)}, inputs=("data",)
)


def loss(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"])
    return (x.astype(jnp.float32) ** 2).mean()


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(batch=256):
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")
    params = {"layers": [{"w": w} for _ in range(LAYERS)]}
    return params, jax.ShapeDtypeStruct((batch, WIDTH), "float32")


def mesh_of(machine="cpu:8"):
    return iso.planner.topology(machine).mesh((2, 4), ("data", "model"))


def totals(report):
    found = {}
    for one in report.collectives:
        key = one.kind, one.axes
        found[key] = found.get(key, 0) + one.bytes * one.count
    return found


def test_what_is_at_rest_is_exact_and_the_rest_has_lines():
    report = estimate(step, arguments(), mesh_of(), PLAN)
    assert report.memory.parameters == LAYERS * WIDTH * WIDTH * 4 // 4
    assert report.memory.inputs == 256 * WIDTH * 4 // 2
    first = step.__code__.co_firstlineno
    assert {one.line for one in report.collectives} <= {
        f"test_estimating.py:{first + at}" + where
        for at, where in ((-4, " (loss)"), (-3, " (loss)"), (1, " (step)"))
    }
    products = 3 * LAYERS - 1  # nobody asks for the gradient of the batch
    assert report.flops >= products * 2 * 256 * WIDTH * WIDTH / 8
    assert report.fits
    assert report.time.serial >= report.time.overlapped > 0


def test_the_partitioner_says_what_the_compiled_program_does():
    """The same program compiled in this process, for the devices that are here."""
    report = estimate(
        step, arguments(), mesh_of(), PLAN, depth="partition", repeats=False, progress=False
    )
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params, x = arguments()
    layouts = PLAN.resolve(params, mesh).shardings_like(params)
    batch = jax.sharding.NamedSharding(mesh, P("data"))
    run = jax.jit(
        step, in_shardings=(layouts, batch), out_shardings=(layouts, None), donate_argnums=0
    )
    compiled = run.lower(params, x).compile()
    want = {}
    for one in collectives(compiled.as_text()):
        kind = one.kind.replace("_", "-")
        want[kind] = want.get(kind, 0) + one.bytes * one.times
    have = {}
    for (kind, _), size in totals(report).items():
        have[kind] = have.get(kind, 0) + size
    assert have == want
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
    assert report.memory.peak == pytest.approx(peak, rel=0.05)
    trace = estimate(step, arguments(), mesh_of(), PLAN)
    assert totals(trace) == totals(report)
    assert trace.memory.peak == pytest.approx(report.memory.peak, rel=0.15)


def test_layers_that_keep_more_as_they_are_written_are_told():
    def train(layers, x):
        def loss(layers):
            value = x
            for up, down in layers:
                value = value + jax.nn.gelu(value @ up) @ down
            return jnp.mean(value**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, layers, jax.grad(loss)(layers))

    shapes = (64, 256), (256, 64)
    layer = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    given = [layer] * 8, jax.ShapeDtypeStruct((1024, 64), "float32")
    mesh = topology("v5e:2x4").mesh((8,), ("data",))
    plan = Plan.fsdp("data", min_bytes=0)
    written = estimate(train, given, mesh, plan)
    looped = estimate(train, given, mesh, plan, repeats=True)
    (told,) = (one for one in looped.assumptions if "written out" in one)
    assert human_bytes(written.memory.peak) in told
    assert human_bytes(looped.memory.peak) in told
    assert written.memory.peak > 1.05 * looped.memory.peak
    assert not [one for one in written.assumptions if "written out" in one or one == LOOPED]


def test_memory_may_be_said_and_what_is_missing_is_told():
    report = estimate(step, arguments(), mesh_of("v5e:2x4"), memory=1 << 20)
    assert not report.fits
    assert report.memory.capacity == 1 << 20
    assert any("Plan.fsdp(" in line and "saves 1.1 MiB" in line for line in report.advice)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"mesh": "v5e:2x4"}, ShardingError, r"mesh\(\(2, 4\), \('data', 'model'\)\)"),
        ({"mesh": "v5e:3x5"}, ShardingError, "v5e:3x5"),
        ({"depth": "deep"}, ValueError, "depth= must be 'trace', 'partition', 'compile'"),
        ({"plan": Plan({"*": ("rows",)})}, PlanError, r"layers\.0\.w: .*'rows'"),
        ({"batch": ("y",)}, ShardingError, "names no argument of the step: y"),
        ({"memory": "16GB"}, ValueError, r"such as 16 \* 10\*\*9, not '16GB'; None uses"),
        ({"memory": 0}, ValueError, "memory= is the bytes that one device may use, .* not 0;"),
        ({"memory": -(10**9)}, ValueError, "not -1000000000"),
        ({"timeout": 0}, ValueError, "timeout= must be seconds above 0, not 0; None waits"),
        ({"plan": "fsdp"}, PlanError, r"plan='fsdp' is a text, .*Plan\.fsdp\('data'\)"),
        ({"repeats": "auto"}, ValueError, "repeats= must be True, False or None, not 'auto'"),
        ({"args": {"x": 1}}, TypeError, r"list of the step's arguments, not dict; .* \(x,\)"),
        ({"step": None}, TypeError, "step must be a function, a module or a model, not NoneType"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said(change, error, said):
    given = {"step": step, "args": arguments(), "mesh": mesh_of(), "plan": None} | change
    with pytest.raises(error, match=said):
        estimate(**given)


def test_a_compiler_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("ISOSHARD_COMPILER_PYTHON", raising=False)
    with pytest.raises(RuntimeError, match="pip install libtpu"):
        estimate(
            step, arguments(), mesh_of("v5e:2x4"), depth="compile", cache=False, progress=False
        )
