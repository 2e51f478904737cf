"""Depths "partition" and "compile" of a step, and steps for more devices than a host can have."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest

from isoshard.planner.machine.topologies import topology
from isoshard.planner.programs import compiling
from isoshard.planner.programs.compile_worker import ProgramText
from isoshard.planner.programs.compiling import by_compiler, by_partitioner
from isoshard.planner.programs.scaled_meshes import scaled_down
from isoshard.planner.programs.targets import CompilationError, PlanningError
from tests.planner.programs.sample_steps import layers
from tests.planner.programs.test_recorded_programs import RECORDED, total

AXES = ("data", "model")


def test_a_step_for_a_cpu_needs_what_its_compiler_says(tmp_path, monkeypatch):
    """It is compiled once, and the user's environment does not reach the host's compiler."""
    step = layers(topology("cpu:4").mesh((2, 2), AXES))
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    monkeypatch.setenv("ISOSHARD_PLAN_CACHE", str(tmp_path))
    told, target = [], compiling.target_of(step.mesh, compiling.topology_of(step.mesh))
    program = compiling.exported(step, "cpu")
    made = compiling.compiled(program, target, progress=lambda *said: told.append(said))
    assert made.text.startswith("HloModule") and not made.cached
    assert set(made.versions) == {"jax", "jaxlib"} and told[0][0] == "compiling"
    again = compiling.compiled(program, target, cache=tmp_path, python=None)
    assert again.cached and (again.text, again.memory) == (made.text, made.memory)
    found = by_compiler(step, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    stats = made.memory
    assert found.memory.peak == (
        stats["argument_size_in_bytes"]
        + stats["output_size_in_bytes"]
        - stats["alias_size_in_bytes"]
        + stats["temp_size_in_bytes"]
    )
    weights = 2 * 3 * 256 * 512 * 2 // 4
    assert (found.memory.parameters, found.memory.inputs) == (weights, 64 * 256 * 2 // 2)
    assert found.memory.activations == found.memory.peak - weights - 64 * 256
    assert found == by_partitioner(step, cache=tmp_path)
    assert found.versions["jax"] == jax.__version__


def test_a_step_for_16_tpus_follows_from_those_for_8_and_4(tmp_path, monkeypatch):
    """In its own dtype: the host's compiler would send 32 bits of each 16, and keep as many."""
    machine = topology("v5e:4x4")
    step = layers(machine.mesh((8, 2), AXES), width=256, inner=512, batch=1024)
    monkeypatch.setattr(compiling, "HOST_DEVICES", 8)
    found = by_partitioner(step, cache=tmp_path)
    sent = collections.Counter()
    for op in found.ops:
        if op.is_collective:
            assert op.line.startswith("sample_steps.py:")
            sent[op.name, op.axes, op.dtype] += op.sent * op.times
    one, rows = 256 * 256 * 2, 128 * 256 * 2
    assert sent == {
        ("all-gather", ("data",), "bfloat16"): 4 * 3 * one,
        ("all-reduce", ("model",), "bfloat16"): 2 * 3 * rows,
        ("reduce-scatter", ("data",), "bfloat16"): 2 * 3 * one,
        ("all-reduce", ("data",), "float32"): 4,
    }
    assert total(found.ops).flops == pytest.approx(18 * 2 * 256 * 256 * 128)
    memory = found.memory
    # As partitioned for 16 devices at once.
    assert total(found.ops).bytes == pytest.approx(16_646_490, rel=0.02)
    assert memory.peak == pytest.approx(1_179_668, rel=0.02)
    assert (memory.parameters, memory.inputs) == (2 * 3 * 256 * 512 * 2 // 16, 8 * rows // 8)
    assert memory.capacity == machine.chip.memory and "modelled" in found.notes[0]
    assert (memory.largest[0].bytes, memory.largest[0].dtype) == (3 * one // 2, "bfloat16")
    assert memory.peak_line.startswith("sample_steps.py:")
    assert found.notes[-1].endswith("and the mesh has 16")


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


def test_a_product_without_tiles_is_compiled_by_the_library(tmp_path, monkeypatch):
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
    found = by_compiler(step, cache=tmp_path)
    assert [target.flags for target in tried] == [(), ("--xla_gpu_enable_triton_gemm=false",)]
    assert "compiled with products by cuBLAS" in found.notes[0]

    def refused(program, target, **given):
        raise CompilationError("INTERNAL: something else")

    monkeypatch.setattr(compiling, "compiled", refused)
    with pytest.raises(CompilationError, match="something else"):
        by_compiler(step, cache=tmp_path)
