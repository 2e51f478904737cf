"""Depths "partition" and "compile" of a step, and steps for more devices than a host can have."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest

from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.programs import compiling
from isoshard.core.planner.programs.compile_worker import ProgramText
from isoshard.core.planner.programs.compiling import by_compiler, by_partitioner
from isoshard.core.planner.programs.device_ops import total
from isoshard.core.planner.programs.planning_errors import CompilationError, PlanningError
from isoshard.core.planner.programs.scaled_meshes import scaled_down
from tests.core.planner.programs.sample_steps import layers
from tests.core.planner.programs.test_hlo_text import RECORDED

AXES = ("data", "model")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("plan")


def sent(program):
    found = collections.Counter()
    for op in program.ops:
        if op.is_collective:
            found[op.name, op.axes, op.dtype, op.line] += op.sent * op.times
    return found


def test_a_step_for_a_cpu_needs_what_its_compiler_says(cache):
    step = layers(topology("cpu:4").mesh((2, 2), AXES))
    found = by_compiler(step, cache=cache)
    target = compiling.target_of(step.mesh, compiling.topology_of(step.mesh))
    stats = compiling.compiled(compiling.exported(step, "cpu"), target, cache=cache).memory
    assert found.memory.peak == (
        stats["argument_size_in_bytes"]
        + stats["output_size_in_bytes"]
        - stats["alias_size_in_bytes"]
        + stats["temp_size_in_bytes"]
    )
    weights = 2 * 3 * 256 * 512 * 2 // 4
    assert (found.memory.parameters, found.memory.inputs) == (weights, 64 * 256 * 2 // 2)
    assert found.memory.activations == found.memory.peak - weights - 64 * 256
    assert found == by_partitioner(step, cache=cache)
    assert found.versions["jax"] == jax.__version__


def test_a_step_for_a_tpu_is_partitioned_in_its_own_dtype(cache):
    """The host's compiler would send 32 bits of each 16, and keep as many."""
    machine = topology("v5e:2x2")
    step = layers(machine.mesh((2, 2), AXES), width=1024, inner=2048, batch=8192)
    found = by_partitioner(step, cache=cache)
    by_kind = collections.Counter()
    for (kind, axes, dtype, line), size in sent(found).items():
        assert line.startswith("sample_steps.py:")
        by_kind[kind, axes, dtype] += size
    one = 1024 * 1024 * 2
    assert by_kind == {
        ("all-gather", ("data",), "bfloat16"): 4 * 3 * one,
        ("all-reduce", ("model",), "bfloat16"): 2 * 3 * 4 * one,
        ("reduce-scatter", ("data",), "bfloat16"): 2 * 3 * one,
        ("all-reduce", ("data",), "float32"): 4,
    }
    assert total(found.ops).flops == 18 * 2 * 1024 * 1024 * 4096
    assert found.memory.capacity == machine.chip.memory
    assert found.notes and "modelled" in found.notes[0]
    largest = found.memory.largest[0]
    assert (largest.bytes, largest.dtype) == (12 * one, "bfloat16")
    assert found.memory.peak_line.startswith("sample_steps.py:")


def test_numbers_of_16_devices_follow_from_those_of_8_and_4(cache, monkeypatch):
    step = layers(topology("v5e:4x4").mesh((8, 2), AXES), width=256, inner=512, batch=1024)
    whole = by_partitioner(step, cache=cache)
    monkeypatch.setattr(compiling, "HOST_DEVICES", 8)
    scaled = by_partitioner(step, cache=cache)
    assert sent(scaled) == sent(whole)
    assert total(scaled.ops).flops == pytest.approx(total(whole.ops).flops)
    assert total(scaled.ops).bytes == pytest.approx(total(whole.ops).bytes, rel=0.02)
    assert scaled.memory.peak == pytest.approx(whole.memory.peak, rel=0.02)
    assert scaled.memory.parameters == whole.memory.parameters
    assert scaled.memory.inputs == whole.memory.inputs
    assert scaled.notes[-1].endswith("and the mesh has 16")


def test_what_is_written_for_each_device_cannot_be_scaled():
    mesh = topology("v5e:8x8").mesh((16, 4), AXES)
    spec = jax.P("data")
    inner = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=spec, out_specs=spec)
    program = jax.make_jaxpr(inner)(jax.ShapeDtypeStruct((64, 4), jnp.float32))
    step = dataclasses.replace(layers(mesh), program=program, name="mine")
    with pytest.raises(PlanningError, match=r"mine: .*jax.shard_map.*depth='compile'"):
        scaled_down(step, 32)


def test_no_axis_that_can_be_halved():
    step = layers(topology("v5e:8x8").mesh((3, 7), AXES))
    with pytest.raises(PlanningError, match=r"no axis of .* can be halved"):
        scaled_down(step, 16)


def test_a_product_without_tiles_is_compiled_by_the_library(cache, monkeypatch):
    step = layers(topology("h100:1x4").mesh((2, 2), AXES), width=1024, inner=2048, batch=8192)
    tried = []

    def compiled(program, target, **given):
        tried.append(target)
        if not target.flags:
            raise CompilationError("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %d")
        memory = dict.fromkeys(("argument", "output", "alias", "temp"), 1)
        memory = {f"{name}_size_in_bytes": size for name, size in memory.items()}
        return ProgramText((RECORDED / "h100.hlo").read_text(), memory, {}, {}, 0.0)

    monkeypatch.setattr(compiling, "compiled", compiled)
    found = by_compiler(step, cache=cache)
    assert [target.flags for target in tried] == [(), ("--xla_gpu_enable_triton_gemm=false",)]
    assert "compiled with products by cuBLAS" in found.notes[0]

    def refused(program, target, **given):
        raise CompilationError("INTERNAL: something else")

    monkeypatch.setattr(compiling, "compiled", refused)
    with pytest.raises(CompilationError, match="something else"):
        by_compiler(step, cache=cache)
