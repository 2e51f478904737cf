"""`iso.planner.estimate`: the report of a step on a machine under a plan.

>>> import jax
>>> from isoshard.core.plan import Plan
>>> mesh = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
>>> step = lambda params, x: jax.nn.relu(x @ params["up"]) @ params["down"]
>>> params = {"up": jax.ShapeDtypeStruct((512, 2048), "bfloat16"),
...           "down": jax.ShapeDtypeStruct((2048, 512), "bfloat16")}
>>> x = jax.ShapeDtypeStruct((256, 512), "bfloat16")
>>> plan = Plan({"up": (None, "model"), "down": ("model", None)}, inputs=("data",))
>>> report = estimate(step, (params, x), mesh, plan)
>>> report.fits, report.memory.parameters
(True, 1048576)
>>> [(use.kind, use.axes, use.bytes, use.count) for use in report.collectives]
[('all-reduce', ('model',), 131072, 1)]
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from isoshard.core.kit import ShardingError, TracedStep, as_mesh, human_bytes

from .costs.collective_times import seconds
from .costs.device_program import DeviceProgram, collectives_of
from .costs.roofline import time_of
from .machine.topologies import Topology, device_memory, topology, topology_of
from .programs.compiling import by_compiler, by_partitioner
from .propagation.boundary_shardings import for_compilers
from .propagation.trace_depth import by_tracing
from .reports.advice import advise, input_uses
from .reports.findings import CollectiveUse, Depth
from .reports.report import Report
from .traced.of_step import traced_step
from .traced.rolled_step import rolled_step

DEPTHS = ("trace", "partition", "compile")
LOOPED = (
    "equal layers are planned as a loop, as xs.compile(step, repeat='auto') runs them; "
    "repeats=False plans the step as it is written"
)
"""Note of an estimate with equal layers as a loop."""
MORE = 1.05
"""The factor of memory above which the report has a note about layers written out."""


def estimate(
    step: Any,
    args: Sequence[Any],
    mesh: Any,
    plan: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    depth: Depth = "trace",
    batch: Collection[str] | None = None,
    memory: int | None = None,
    timeout: float | None = 600.0,
    progress: bool | None = None,
    cache: bool = True,
    repeats: bool | None = None,
) -> Report:
    """Estimate memory, traffic and time of a step on hardware that is not attached.

    Args:
        step: a training or inference step: a function of torch (also one made by `xs.compile`; its
            module may be on "meta"), of Flax or of JAX, or an annotated ONNX model.
        args: its arguments: arrays or tensors, on "meta" too, or `jax.ShapeDtypeStruct`s.
        mesh: where it would run: `topology("v5e:16x16").mesh((16, 16), ("data", "model"))`, or a
            mesh of attached devices.
        plan: a `Plan`, or one spec for every parameter. None: arrays keep their shardings, and all
            else is replicated.
        kwargs: its keyword arguments.
        depth: "trace" reads the traced program; "partition" runs XLA's partitioner on the host;
            "compile" the compiler of the target, which must be installed.
        batch: of a JAX function, the names of the arguments that are inputs; by default those that
            it does not return.
        memory: bytes that one device may use; by default those of the chip.
        timeout: seconds after which a compilation is ended; None waits.
        progress: whether to show how long it takes; by default on a terminal.
        cache: whether compilations are cached on disk.
        repeats: whether equal layers are planned as a loop over them, which compiles once; False
            plans the step as it is written. By default loops are compiled, and depth "trace" reads
            the step as it is written. If that needs more memory, the report has a note.

    Returns:
        The report.

    Raises:
        PlanError: the plan does not fit the step.
        ShardingError: `mesh` is not a mesh.
        ValueError: `depth` is none of the three, `memory` or `timeout` is not above 0, or `repeats`
            is not True, False or None.
        PlanningError: the target's compiler is missing, failed, or took too long.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from isoshard.planner.machine.topologies import topology
        >>> mesh = topology("v5e:4x4").mesh((4, 4), ("data", "model"))
        >>> w = jax.ShapeDtypeStruct((8192, 8192), "float32")
        >>> report = estimate(jnp.dot, (w, w), mesh, ("data", "model"))
        >>> report.memory.fits, report.mesh
        (True, {'data': 4, 'model': 4})
    """
    if depth not in DEPTHS:
        raise ValueError(f"depth= must be {', '.join(map(repr, DEPTHS))}, not {depth!r}")
    if repeats not in (True, False, None):
        raise ValueError(f"repeats= must be True, False or None, not {repeats!r}")
    started = time.perf_counter()
    mesh = planned_mesh(mesh)
    device_memory(mesh, memory)
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout= must be seconds above 0, not {timeout!r}; None waits")
    traced = traced_step(step, args, kwargs or {}, mesh, plan, batch=batch)
    options = {"timeout": timeout, "progress": progress, "cache": cache}
    program = device_program(traced, depth, repeats=repeats, **options)
    return report_of(traced, program, depth, plan, memory, time.perf_counter() - started)


def device_program(
    traced: TracedStep, depth: Depth, *, repeats: bool | None = None, **how: Any
) -> DeviceProgram:
    """The program of one device of a traced step.

    Args:
        traced: the step.
        depth: how it is estimated.
        repeats: whether equal layers are planned as a loop; by default where they are compiled.
        **how: `timeout`, `progress` and `cache` of a compilation.
    """
    looped = traced
    if depth != "trace" if repeats is None else repeats:
        looped = rolled_step(traced) if depth == "trace" else for_compilers(traced)
    if depth == "trace":
        result = by_tracing(looped)
    else:
        result = (by_partitioner if depth == "partition" else by_compiler)(looped, **how)
    if looped is traced:
        return result
    traced_program = result if depth == "trace" else by_tracing(rolled_step(traced))
    written = by_tracing(traced)
    more = _written_note(written.memory.peak, traced_program.memory.peak)
    notes = (*result.notes, LOOPED, *more)
    return dataclasses.replace(result, notes=notes, findings=written.findings)


def _written_note(written: int, looped: int) -> tuple[str, ...]:
    """A note if layers need more memory as they are written than as a loop."""
    if written <= MORE * looped:
        return ()
    return (
        f"written out, layers need more memory: {human_bytes(written)} a device, as a loop "
        f"{human_bytes(looped)}, by the traced program",
    )


def report_of(
    traced: TracedStep,
    program: DeviceProgram,
    depth: Depth,
    plan: Any,
    memory: int | None,
    taken: float,
) -> Report:
    """The report of an estimate.

    Args:
        traced: the step.
        program: of one device.
        depth: how it was estimated.
        plan: the caller's.
        memory: bytes that one device may use; by default those of the chip.
        taken: seconds that it took.
    """
    mesh = traced.mesh
    machine = topology_of(mesh)
    capacity = device_memory(mesh, memory)
    spent, timeline = time_of(program, mesh)
    report = Report(
        traced.name,
        traced.framework,
        depth,
        machine.name,
        dict(mesh.shape),
        "none" if plan is None else str(plan),
        dataclasses.replace(program.memory, capacity=capacity),
        collective_uses(program, mesh),
        sum(op.flops * op.times for op in program.ops),
        sum(op.bytes * op.times for op in program.ops),
        spent,
        (),
        timeline,
        taken,
        _versions() | dict(program.versions),
        input_uses(traced.inputs),
        program.notes,
    )
    return dataclasses.replace(report, advice=(*program.findings, *advise(report)))


def collective_uses(program: DeviceProgram, mesh: Mesh) -> tuple[CollectiveUse, ...]:
    """The collectives of a program by kind, axes, size and line, those that take longest first."""
    return tuple(
        sorted(
            (
                dataclasses.replace(use, seconds=use.count * _seconds_of(use, mesh))
                for use in collectives_of(program.ops, mesh)
            ),
            key=lambda use: (-use.seconds, use.kind, use.line, use.bytes),
        )
    )


def _seconds_of(use: CollectiveUse, mesh: Mesh) -> float:
    return seconds(use.kind, use.bytes, use.axes, mesh)


def planned_mesh(mesh: Any) -> Mesh:
    """The mesh that a step is planned for.

    Raises:
        ShardingError: it is a topology, or the text of one, which has no axes.
    """
    if isinstance(mesh, str):
        mesh = topology(mesh)
    if isinstance(mesh, Topology):
        shape = mesh.shape if len(mesh.shape) == 2 else (mesh.size,)
        names = ("data", "model")[: len(shape)]
        raise ShardingError(
            f"{mesh.name} is a machine of {mesh.size} devices, and a step is planned on a mesh "
            f"with named axes: topology({mesh.name!r}).mesh({shape}, {names})"
        )
    return as_mesh(mesh)


def _versions() -> dict[str, str]:
    names = ("isoshard", "jax", "jaxlib")
    return {name: importlib.metadata.version(name) for name in names}
