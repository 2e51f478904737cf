"""A step at depth "partition" and "compile": compiled in another process, read, and summed up.

`by_compiler` runs the target's own compiler, so the peak memory is that of its statistics.
`by_partitioner` runs XLA's partitioner on this host's virtual devices: its collectives are exact;
the passes of the target's compiler are modelled (`target_schedule`, `collective_rewrites`,
`windowed_products`).
Flags keep the host's compiler from widening bfloat16, from library calls for products and from
combining reductions, none of which the targets do; and from removing barriers before it schedules:
they delay recomputation (`jax.checkpoint`) until the gradient needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from isoshard.core.kit import HloModule, TracedStep, parsed
from isoshard.planner.costs.device_program import DeviceProgram
from isoshard.planner.machine.topologies import Topology, topology_of
from isoshard.planner.reports.report import LiveArray, MemoryEstimate

from .collective_rewrites import fold_chained
from .compile_worker import Listener, ProgramText, compiled
from .device_ops import device_ops, dtype_name, line_at
from .exporting import exported
from .hlo_liveness import ProgramLiveness, liveness
from .scaled_meshes import scaled_back, scaled_down
from .target_schedule import target_liveness
from .targets import HOST_DEVICES, CompilationError, CompileTarget, target_of
from .windowed_products import rewrite_windowed, windowed_products

PLATFORMS = {"cpu": "cpu", "tpu": "tpu", "gpu": "cuda"}
"""A chip's platform -> its name in `jax.export`."""

HOST = CompileTarget(
    "host",
    flags=(
        "--xla_disable_hlo_passes=float-normalization-bf16,float-normalization-f8e5m2,"
        "all-reduce-promotion,cpu-all-reduce-combiner,dot-library-rewriter,cse_barrier_expander",
        "--xla_cpu_enable_concurrency_optimized_scheduler=false",
        "--xla_backend_optimization_level=0",
    ),
    keep="*cpu_after_optimizations.txt",
)
"""The host's compiler, as near to those of TPUs and GPUs as its flags allow.

Without the passes that widen bfloat16 it fails on such a program when it emits code; by then the
scheduled program has been written to a file, and the time for the code is saved.
"""

_SHOWN = 20

_UNTILED = "Couldn't find output tile sizes"
_BY_LIBRARY = ("--xla_gpu_enable_triton_gemm=false",)
_UNTRIED = (
    "XLA found no tiles for a product; where the GPU is, it tries others and cuBLAS. So this was "
    f"compiled with products by cuBLAS ({_BY_LIBRARY[0]})"
)
"""XLA compiles products to Triton kernels, with guessed tiles where it cannot autotune."""


def by_partitioner(
    step: TracedStep,
    *,
    timeout: float | None = None,
    progress: bool | Listener | None = None,
    cache: bool | Path | str = True,
    python: str | None = None,
) -> DeviceProgram:
    """Split a step by XLA's partitioner on this host, without the target's compiler.

    Args:
        step: over attached or described devices.
        timeout: seconds after which the compiler is ended; None waits.
        progress: a callback, True, False, or None: a bar if there is a terminal.
        cache: whether to use the cache on disk, or its folder.
        python: the interpreter that compiles; see `targets.compiler_python`.

    Returns:
        Operations and memory of one device. Of a step for virtual devices of a CPU they are those
        of its compiler, as of `by_compiler`.

    Raises:
        PlanningError: the compiler failed or took too long, or the step cannot be scaled down
            from more devices than a host can have.
    """
    arguments = {"timeout": timeout, "progress": progress, "cache": cache, "python": python}
    if step.mesh.size <= HOST_DEVICES:
        return _partition(step, arguments)
    large, small = scaled_down(step, HOST_DEVICES)
    sizes = (large.size, small.size)
    programs = [_partition(scaled.step, arguments, scaled.axis) for scaled in (large, small)]
    full = step.mesh.shape[large.axis]
    program = scaled_back(programs[0], programs[1], sizes, full, step)
    joined = "collectives that its compiler would combine are counted separately"
    note = (
        f"partitioned for {large.size} and {small.size} devices along {large.axis!r}, and scaled "
        f"to {full}: this host can have {HOST_DEVICES} devices, and the mesh has {step.mesh.size}"
    )
    return dataclasses.replace(program, notes=(*program.notes, joined, note))


def _partition(step: TracedStep, arguments: Mapping[str, Any], scaled: str = "") -> DeviceProgram:
    machine = topology_of(step.mesh)
    target = CompileTarget("host") if machine.chip.platform == "cpu" else HOST
    program = compiled(exported(step, "cpu"), target, **arguments)
    if target is HOST:
        return partitioned(step, program, machine, scaled)
    return _as_compiled(step, program, machine)


def by_compiler(
    step: TracedStep,
    *,
    timeout: float | None = None,
    progress: bool | Listener | None = None,
    cache: bool | Path | str = True,
    python: str | None = None,
) -> DeviceProgram:
    """Compile a step by the target's own compiler, which needs no accelerator.

    Args:
        step: over attached or described devices.
        timeout: seconds after which the compiler is ended; None waits.
        progress: a callback, True, False, or None: a bar if there is a terminal.
        cache: whether to use the cache on disk, or its folder.
        python: the interpreter that compiles; see `targets.compiler_python`.

    Returns:
        Operations and memory of one device; the peak is arguments, results that take no
        argument's memory, and temporaries, by the compiler's statistics.

    Raises:
        CompilerMissingError: the target's compiler is not installed.
        PlanningError: the compiler failed, or took too long.
    """
    machine = topology_of(step.mesh)
    platform = PLATFORMS[machine.chip.platform]
    arguments: dict[str, Any] = {
        "timeout": timeout,
        "progress": progress,
        "cache": cache,
        "python": python,
    }
    target, notes = target_of(step.mesh, machine), ()
    exported_step = exported(step, platform)
    try:
        program = compiled(exported_step, target, **arguments)
    except CompilationError as error:
        if _UNTILED not in str(error):
            raise
        program = compiled(
            exported_step, dataclasses.replace(target, flags=_BY_LIBRARY), **arguments
        )
        notes = (_UNTRIED,)
    return dataclasses.replace(_as_compiled(step, program, machine), notes=notes)


def partitioned(
    step: TracedStep, program: ProgramText, machine: Topology, scaled: str = ""
) -> DeviceProgram:
    """A step on a TPU or a GPU, by the partitioner's program."""
    chip = machine.chip
    module = fold_chained(parsed(program.text), chip.platform)
    arguments = [_axes(leaf.sharding.spec) for leaf in step.inputs]
    products = windowed_products(module, step.mesh, arguments, chip.name, scaled)
    result, notes = target_liveness(module, chip.platform, chip.memory, products)
    sending = rewrite_windowed(module, products)
    ops = device_ops(sending, step.mesh, result.at, target=chip.platform, joining=not scaled)
    memory = _memory(step, sending, result, result.total, machine)
    note = "fusion and liveness of the target's compiler are modelled, from the partitioned program"
    return DeviceProgram(ops, memory, (note, *notes), program.versions)


def _axes(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes of a spec."""
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    return frozenset(axis for names in entries for axis in names)


def _as_compiled(step: TracedStep, program: ProgramText, machine: Topology) -> DeviceProgram:
    module = parsed(program.text)
    result = liveness(module)
    peak = peak_of(program.memory)
    ops = device_ops(module, step.mesh, result.at)
    memory = _memory(step, module, result, peak, machine)
    return DeviceProgram(ops, memory, (), program.versions)


def peak_of(memory: Mapping[str, int]) -> int:
    """The peak memory of a compiled program, in bytes.

    Example:
        >>> peak_of({"argument_size_in_bytes": 8, "output_size_in_bytes": 8,
        ...          "alias_size_in_bytes": 8, "temp_size_in_bytes": 4})
        12
    """
    return (
        memory["argument_size_in_bytes"]
        + memory["output_size_in_bytes"]
        - memory["alias_size_in_bytes"]
        + memory["temp_size_in_bytes"]
    )


def _memory(
    step: TracedStep, module: HloModule, result: ProgramLiveness, peak: int, machine: Topology
) -> MemoryEstimate:
    roles = dict.fromkeys(("parameter", "buffer", "optimizer", "input"), 0)
    for leaf in step.inputs:
        role = leaf.role if leaf.role in roles else "input"
        roles[role] += leaf.bytes_per_device
    largest = [
        LiveArray(
            buffer.maker.name,
            buffer.shape,
            dtype_name(buffer.dtype),
            buffer.bytes,
            line_at(module, buffer.maker),
        )
        for buffer in sorted(result.alive, key=lambda leaf: -leaf.bytes)[:_SHOWN]
        if buffer.bytes
    ]
    largest += [
        LiveArray(
            leaf.name,
            tuple(leaf.sharding.shard_shape(leaf.shape)),
            leaf.dtype.name,
            leaf.bytes_per_device,
            "",
        )
        for leaf in step.inputs
    ]
    largest.sort(key=lambda leaf: -leaf.bytes)
    return MemoryEstimate(
        roles["parameter"],
        roles["buffer"],
        roles["optimizer"],
        roles["input"],
        max(0, peak - sum(roles.values())),
        peak,
        line_at(module, result.peak) if result.peak else "",
        tuple(largest[:_SHOWN]),
        machine.chip.memory,
    )
