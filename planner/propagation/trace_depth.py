"""Depth "trace": the program of one device, from a step's jaxpr and the shardings of its inputs.

>>> import jax
>>> import jax.numpy as jnp
>>> import numpy as np
>>> from jax.sharding import NamedSharding, PartitionSpec as P
>>> from isoshard.planner.machine.topologies import topology
>>> from isoshard.core.traced.traced_step import StepInput, StepResult
>>> mesh = topology("v5e:4x4").mesh((4, 4), ("data", "model"))
>>> def layer(x, up, down):
...     return jax.nn.relu(x @ up) @ down
>>> shapes = {"x": (64, 512), "up": (512, 2048), "down": (2048, 512)}
>>> specs = {"x": P("data"), "up": P(None, "model"), "down": P("model")}
>>> inputs = tuple(
...     StepInput(n, "parameter", s, np.dtype("float32"), NamedSharding(mesh, specs[n]))
...     for n, s in shapes.items()
... )
>>> traced = jax.make_jaxpr(layer)(*(jnp.zeros(s) for s in shapes.values()))
>>> program = by_tracing(TracedStep("layer", "jax", traced, inputs, (StepResult("y"),), mesh))
>>> [(op.name, op.axes, op.sent) for op in program.ops if op.is_collective]
[('all-reduce', ('model',), 32768)]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from isoshard.core.kit import TracedStep, line_of
from isoshard.planner.scheduling.kernels import Kernel
from isoshard.planner.scheduling.liveness import Liveness

from ..costs.device_program import DeviceOp, DeviceProgram
from ..costs.roofline import op_time
from ..machine.topologies import topology_of
from ..reports.report import LiveArray, MemoryEstimate
from .factors import ArraySharding
from .flat_program import CONSTANT, FlatProgram, flattened
from .fusion import Fusion
from .layout_copies import REORDER, copy_gpu_operands, reorder
from .local_program import LocalProgram
from .self_split import with_custom_partitions
from .sharding_propagation import ArrayShardings, propagate
from .spmd_lowering import spmd_lowered
from .spmd_rewrites import promote_floats, reassociate_sums
from .step_memory import WITHIN, liveness, waiting
from .target_rules import RULES, TargetRules
from .trace_findings import limit_note, split_heads, trace_notes

LARGEST = 20
"""How many of the largest live arrays are reported."""


def by_tracing(
    step: TracedStep, *, scatters: bool | None = None, kernels: bool = True
) -> DeviceProgram:
    """The program of one device and its memory, without XLA.

    Args:
        step: traced for a mesh, with the layouts of its inputs.
        scatters: whether terms of a split result are added up by a reduce-scatter, as XLA does for
            TPU and GPU, or by an all-reduce and a slice, as it does for CPU. None: by the mesh's
            devices.
        kernels: whether operators of `custom_partitioning` are their devices' own programs, such
            as a kernel of attention; else they are partitioned as what they compute.

    Returns:
        Operations in the order in which they run, and memory. Its notes are the assumptions.
    """
    rules = _rules(step, scatters)
    layouts = ArrayShardings(dict(step.mesh.shape))
    flat = flattened(with_custom_partitions(step) if kernels else step.program)
    sharding, target = value_shardings(step, flat, layouts)
    local = spmd_lowered(flat, layouts, sharding, target, rules)
    if rules.sums_first:
        reassociate_sums(local)
    if rules.reorders_operands:
        reorder(local)
    if rules.summed_last:
        copy_gpu_operands(local)
    promote_floats(local, rules.widens)
    fusion = Fusion(local, rules)
    replaced = {
        value: local.inputs[result.replaces]
        for value, result in zip(local.results, step.results, strict=True)
        if value != CONSTANT and result.replaces is not None
    }

    def seconds(kernel: Kernel) -> float:
        return op_time(_op(local, layouts, kernel, 1, 0, 0, False), step.mesh).seconds

    alive = liveness(fusion, replaced, seconds)
    new = sum(
        local.bytes[value]
        for value, result in zip(local.results, step.results, strict=True)
        if value != CONSTANT and result.replaces is None
    )
    always = sum(local.bytes[leaf] for leaf in local.inputs) + new
    chip = topology_of(step.mesh).chip
    notes = trace_notes(step.program, rules, chip.platform)
    limit = rules.scheduled_bytes(chip.memory, always)
    if limit is not None and always + alive.peak > limit:
        needed = always + alive.peak
        alive = liveness(fusion, replaced, seconds, limit - always)
        notes = (*notes, limit_note(needed, limit, always + alive.peak))
    ops = tuple(_ops(local, layouts, alive, always))
    memory = _memory(step, local, alive, always)
    return DeviceProgram(ops, memory, notes, findings=split_heads(flat, layouts, sharding))


def _rules(step: TracedStep, scatters: bool | None) -> TargetRules:
    rules = RULES[topology_of(step.mesh).chip.platform]
    return rules if scatters is None else dataclasses.replace(rules, scatters=scatters)


def value_shardings(
    step: TracedStep, flat: FlatProgram, layouts: ArrayShardings
) -> tuple[list[ArraySharding], list[ArraySharding | None]]:
    """Shardings of all values, and those required of the results."""
    input_layouts = {
        value: layouts.of_spec(leaf.sharding.spec, len(leaf.shape))
        for value, leaf in zip(flat.inputs, step.inputs, strict=True)
    }
    result_shardings = [shardings.sharding for shardings in step.results]
    shardings = propagate(flat, layouts, input_layouts, result_shardings)
    target = [
        None
        if sharding is None or value == CONSTANT
        else layouts.by_id[layouts.of_spec(sharding.spec, len(flat.shapes[value]))][0]
        for value, sharding in zip(flat.results, result_shardings, strict=True)
    ]
    return shardings, target


def _ops(
    local: LocalProgram,
    layouts: ArrayShardings,
    alive: Liveness,
    always: int,
) -> Iterator[DeviceOp]:
    scopes = 0

    def of(
        kernels: list[Kernel],
        live: list[int],
        times: int,
        scope: int,
        awaited: Collection[int] = (),
    ) -> Iterator[DeviceOp]:
        nonlocal scopes
        for kernel, bytes_alive in zip(kernels, live, strict=True):
            if not kernel.op.bodies:
                waits = id(kernel.op) in awaited
                yield _op(local, layouts, kernel, times, bytes_alive, scope, waits)
            for body, inside in zip(kernel.op.bodies, kernel.inside, strict=True):
                scopes += 1
                loops = body.kind not in WITHIN
                within, for_ = (scopes, waiting(local, body)) if loops else (scope, awaited)
                lives = [bytes_alive] * len(inside)
                yield from of(inside, lives, times * body.times, within, for_)

    yield from of(alive.order, [always + live for live in alive.at], 1, 0)


def _op(
    local: LocalProgram,
    layouts: ArrayShardings,
    kernel: Kernel,
    times: int,
    live: int,
    scope: int,
    waits: bool,
) -> DeviceOp:
    op = kernel.op
    values = [value for value in (*op.operands, *op.results) if value != CONSTANT]
    moved = kernel.read + sum([local.bytes[value] for value in kernel.writes])
    if op.name in ("row", "dynamic_slice", "gather"):
        moved = 2 * sum([local.bytes[result] for result in op.results])
    elif op.name in ("stack", "dynamic_update_slice"):
        update = op.operands[0] if op.name == "stack" else op.operands[1]
        moved = 2 * local.bytes[update] if update != CONSTANT else 0
    several = kernel.together or (kernel,)
    if op.axes:
        inner = [each.op for each in several if each.op.inner]
        reordered = 2 * sum([gather.sent + local.bytes[gather.operands[0]] for gather in inner])
    else:
        reordered = moved if op.name in (REORDER, "transpose") else 0
    return DeviceOp(
        op.name,
        line_of(op.equation) if op.equation is not None else "",
        kernel.flops,
        float(moved),
        _computed_in([local.dtypes[value] for value in values]),
        times,
        layouts.axes(op.axes),
        sum([each.op.sent for each in several]),
        live,
        scope,
        waits,
        reordered=float(reordered),
    )


def _computed_in(dtypes: Sequence[str]) -> str:
    """The dtype of an operation, by those of its values: of the first that is no index or mask."""
    floats = (dtype for dtype in dtypes if dtype.startswith(("float", "bfloat", "complex")))
    return next(floats, dtypes[0] if dtypes else "float32")


def _memory(step: TracedStep, local: LocalProgram, alive: Liveness, always: int) -> MemoryEstimate:
    by_role: dict[str, int] = {}
    arrays = []
    for value, leaf in zip(local.inputs, step.inputs, strict=True):
        by_role[leaf.role] = by_role.get(leaf.role, 0) + local.bytes[value]
        arrays.append(
            LiveArray(leaf.name, local.shapes[value], str(leaf.dtype), local.bytes[value], "")
        )
    line = ""
    deepest: Liveness | None = alive
    while deepest is not None and deepest.order:
        op = deepest.order[deepest.index].op
        line = (line_of(op.equation) if op.equation is not None else "") or line
        arrays += [_array(local, value) for value in deepest.alive()]
        deepest = deepest.inside
    peak = always + alive.peak
    inputs = sum(by_role.get(role, 0) for role in ("input", "random", "number"))
    memory = {role: by_role.get(role, 0) for role in ("parameter", "buffer", "optimizer")}
    arrays.sort(key=lambda leaf: -leaf.bytes)
    return MemoryEstimate(
        parameters=memory["parameter"],
        buffers=memory["buffer"],
        optimizer=memory["optimizer"],
        inputs=inputs,
        activations=peak - inputs - sum(memory.values()),
        peak=peak,
        peak_line=line,
        largest=tuple(arrays[:LARGEST]),
        capacity=topology_of(step.mesh).chip.memory,
    )


def _array(local: LocalProgram, value: int) -> LiveArray:
    maker = local.makers[value]
    if maker is not None and maker.bodies and value in maker.results:
        # The result of a loop is reported as the operation inside that computes it.
        end = maker.bodies[-1].results[maker.results.index(value)]
        if end != CONSTANT and local.makers[end] is not None:
            inner = _array(local, end)
            return LiveArray(
                inner.name, local.shapes[value], inner.dtype, local.bytes[value], inner.line
            )
    line = line_of(maker.equation) if maker is not None and maker.equation is not None else ""
    name = "" if maker is None else maker.name
    return LiveArray(name, local.shapes[value], local.dtypes[value], local.bytes[value], line)
