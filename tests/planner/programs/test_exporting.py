"""Steps as bytes: layouts, donations, lines, and devices that no host has."""

from __future__ import annotations

import re
import sys

import jax
import numpy as np
import pytest
from jax import export
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isoshard.core.runtime.hlo_text import parsed
from isoshard.core.traced.traced_step import StepInput, StepResult, TracedStep
from isoshard.planner.machine.topologies import topology
from isoshard.planner.programs.exporting import exported
from isoshard.planner.programs.hlo_costs import costs_of
from isoshard.planner.programs.targets import CompilerMissingError, PlanningError
from isoshard.planner.propagation.trace_depth import by_tracing
from tests.planner.programs.sample_steps import layers

MESH = topology("v5e:2x2").mesh((2, 2), ("data", "model"))


def by_hand(function, count, results, mesh=MESH, dtype="float32", wide=False):
    """A step of `count` equal inputs."""
    whole = NamedSharding(mesh, PartitionSpec("data"))
    shape = jax.ShapeDtypeStruct((8, 4), dtype)
    with jax.enable_x64(wide):
        program = jax.make_jaxpr(function)(*[shape] * count)
    inputs = tuple(
        StepInput(f"in{at}", "parameter", (8, 4), np.dtype(dtype), whole) for at in range(count)
    )
    made = tuple(StepResult(f"out{at}", source, whole) for at, source in enumerate(results))
    return TracedStep("step", "jax", program, inputs, made, mesh, wide=wide)


def read(step):
    return export.deserialize(bytearray(step.data))


def test_each_result_takes_the_memory_of_the_input_that_it_replaces():
    step = by_hand(lambda a, b, c: (c + 1, a + b, b * 2, a - 1), 3, (2, None, 1, 0))
    found = exported(step, "cpu")
    assert found.donated == (0, 1, 2)
    assert found.results == (3, 2, 0, 1)
    # What JAX does with it in the process that compiles:
    program = read(found)
    here = np.array(jax.devices()[:4], object).reshape(2, 2)
    mesh = Mesh(here, ("data", "model"), axis_types=MESH.axis_types)
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=layout)
        for aval, layout in zip(program.in_avals, program.in_shardings_jax(mesh), strict=True)
    ]
    function = jax.jit(
        program.call,
        donate_argnums=found.donated,
        out_shardings=tuple(program.out_shardings_jax(mesh)),
    )
    text = function.lower(*arguments).compile().as_text()
    assert "{0}: (0, {}" in text and "{1}: (1, {}" in text and "{2}: (2, {}" in text


def test_what_is_donated_fits_one_result():
    step = by_hand(lambda a, b: (a.astype("bfloat16"), b + 1), 2, (0, 1))
    assert exported(step, "tpu").donated == (1,)
    step = by_hand(lambda a, b: (a + b, a - b), 2, (0, 0))
    assert exported(step, "tpu").donated == (0,)


def test_a_step_for_4096_devices_is_exported_by_eight():
    step = layers(topology("v5p:16x16x16").mesh((64, 64), ("data", "model")))
    found = exported(step, "cuda")
    assert read(found).nr_devices == 4096
    assert found.axes == (("data", 64), ("model", 64))
    assert len(found.data) < 100_000


def test_lines_survive_and_nothing_else_of_the_stack_does(stacks):
    def from_here():
        return exported(layers(MESH), "tpu")

    found = from_here()
    assert found == exported(layers(MESH), "tpu")  # the same bytes, wherever it is exported
    text = str(read(found).mlir_module_serialized)
    assert "sample_steps.py:" in text and "(layer)" in text
    assert "test_exporting" not in text and "exporting.py" not in text


def test_keys_of_random_generators_are_inputs(tmp_path):
    whole = NamedSharding(MESH, PartitionSpec())
    key = jax.eval_shape(lambda: jax.random.key(0))
    program = jax.make_jaxpr(lambda k: jax.random.normal(k, (8, 8)))(key)
    one = StepInput("key", "random", (), np.dtype("uint32"), whole)
    step = TracedStep("draw", "jax", program, (one,), (StepResult("x", None, whole),), MESH)
    assert str(read(exported(step, "tpu")).in_avals[0].dtype) == "key<fry>"


def test_without_flatbuffers_nothing_is_exported(monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    monkeypatch.delitem(sys.modules, "jax._src.export.serialization", raising=False)
    with pytest.raises(CompilerMissingError, match="pip install flatbuffers"):
        exported(by_hand(lambda a: a + 1, 1, (None,)), "cpu")


def test_what_calls_the_host_cannot_be_exported():
    def speaks(x):
        jax.debug.callback(lambda x: None, x)
        return x * 2

    with pytest.raises(PlanningError, match="step cannot be lowered for 'tpu'"):
        exported(by_hand(speaks, 1, (None,)), "tpu")


def test_a_kernel_of_another_platform_says_at_which_depths_it_can_be_planned():
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] + 1

    def added(x):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    said = "step cannot be lowered for 'cpu', .* depth='trace', or by 'compile', .* for 'tpu': "
    with pytest.raises(PlanningError, match=said):
        exported(by_hand(added, 1, (None,)), "cpu")


def test_compiled_kernels_say_what_they_compute():
    """HLO has a kernel's binary only, so a name scope says its flops, as depth "trace" has them."""

    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] @ x_ref[...].T

    def step(x):
        shape = jax.ShapeDtypeStruct((128, 128), "float32")
        return jax.shard_map(
            pl.pallas_call(kernel, out_shape=shape, grid=(3,)),
            mesh=MESH.abstract_mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(x)

    whole = NamedSharding(MESH, PartitionSpec())
    program = jax.make_jaxpr(step)(jax.ShapeDtypeStruct((128, 128), "float32"))
    one = StepInput("x", "input", (128, 128), np.dtype("float32"), whole)
    made = TracedStep("step", "jax", program, (one,), (StepResult("y", None, whole),), MESH)
    text = read(exported(made, "tpu")).mlir_module()
    (path,) = re.findall(r'loc\("([^"]*/pallas_call)"', text)
    module = parsed(
        "HloModule m\nENTRY %main (x: f32[128,128]) -> f32[128,128] {\n"
        "  %x = f32[128,128]{1,0} parameter(0)\n"
        '  ROOT %y = f32[128,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", '
        f'metadata={{op_name="{path}"}}\n}}\n'
    )
    (traced,) = [op.flops for op in by_tracing(made).ops if op.name == "pallas_call"]
    assert costs_of(module, module.entry, module.root).flops == traced
    assert traced == 3 * 128 * 128 * 2 * 128
