"""A traced step, serialized for another process to compile: StableHLO, shardings, donations.

The program names no device: its meshes are abstract, so 4,096 devices are as good as eight. Of
source locations only the user's lines are kept, as name scopes
(`isoshard.core.traced.source_lines`), so that a step has the same bytes wherever it is estimated.

Operators of `custom_partitioning` have a Python callback for XLA's partitioner, which the process
that compiles does not have. So the callback is called before the export, where its result has
collectives (`self_split`); else the operation on global arrays is exported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax import export
from jax.sharding import Mesh, NamedSharding

from isoshard.core.kit import (
    JaxprRewriter,
    TracedStep,
    closed_call_p,
    flops_of,
    is_typed,
    jaxpr_as_fun,
    line_of,
    no_locations,
    scope_of,
)
from isoshard.planner.propagation.self_split import with_custom_partitions

from .hlo_costs import KERNEL
from .targets import CompilerMissingError, PlanningError


@dataclasses.dataclass(frozen=True)
class ExportedStep:
    """A step's program, ready to be compiled elsewhere.

    Attributes:
        data: `jax.export.Exported`, serialized.
        donated: indices of the inputs whose memory results take.
        results: indices of the step's results, in the order in which the program returns them.
        axes: the mesh's axes and their sizes, in order.
        axis_types: of each axis, as `jax.sharding.AxisType` names it.
        wide: whether 64-bit types are enabled.
        platform: "cpu", "tpu" or "cuda".
    """

    data: bytes
    donated: tuple[int, ...]
    results: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]
    axis_types: tuple[str, ...]
    wide: bool
    platform: str


def exported(step: TracedStep, platform: str) -> ExportedStep:
    """Export a step for a platform.

    Returns:
        The program. JAX pairs each result with the first donated input of its shape and dtype; so
        results that replace an input come first, in the order of those inputs.

    Raises:
        PlanningError: an operation has no lowering for the platform, or calls the host.
        CompilerMissingError: flatbuffers is not installed.

    Example:
        >>> from isoshard.planner.machine.topologies import topology
        >>> from isoshard.core.traced.traced_step import StepInput, StepResult
        >>> layout = NamedSharding(topology("v5e:2x2").mesh((4,), ("x",)),
        ...                        jax.sharding.PartitionSpec("x"))
        >>> program = jax.make_jaxpr(lambda w: w + 1)(jax.ShapeDtypeStruct((8,), "float32"))
        >>> w = StepInput("w", "parameter", (8,), jax.numpy.dtype("float32"), layout)
        >>> step = TracedStep("add", "jax", program, (w,), (StepResult("w", 0, layout),),
        ...                   layout.mesh)
        >>> exported(step, "tpu").donated
        (0,)
    """
    program = with_lines(on_abstract_mesh(with_custom_partitions(step)))
    order, donated = _pairs(step)
    run = jaxpr_as_fun(program)
    function = jax.jit(
        lambda *inputs: _in_order(run(*inputs), order),
        in_shardings=tuple(_abstract(leaf.sharding) for leaf in step.inputs),
        out_shardings=tuple(_abstract(step.results[at].sharding) for at in order),
        keep_unused=True,
    )
    arguments = [
        jax.ShapeDtypeStruct(
            value.shape,
            value.dtype,
            weak_type=value.weak_type,
            sharding=value.sharding if is_typed(value.sharding.mesh) else None,
        )
        for value in program.in_avals
    ]
    anything = [export.DisabledSafetyCheck.custom_call("ALL")]
    try:
        with jax.enable_x64(step.wide), no_locations():
            new = export.export(function, platforms=[platform], disabled_checks=anything)
            data = _serialized(new(*arguments), step.name)
    except (NotImplementedError, ValueError) as error:
        meant = step.mesh.devices.flat[0].platform
        others = "depth='trace' only"
        if platform == "cpu" != meant:
            others = f"depth='trace', or by 'compile', which lowers it for {meant!r}"
        raise PlanningError(
            f"{step.name} cannot be lowered for {platform!r}, so it can be planned by "
            f"{others}: {error}"
        ) from error
    mesh = step.mesh
    axes = tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    types = tuple(dtype.name for dtype in mesh.axis_types)
    return ExportedStep(data, donated, order, axes, types, step.wide, platform)


def _serialized(new: export.Exported, name: str) -> bytes:
    try:
        return bytes(new.serialize())
    except ImportError as error:  # jax does not require what it writes programs with
        raise CompilerMissingError(
            f"{name} cannot be planned at this depth: JAX exports programs by flatbuffers, "
            "which is not installed: pip install flatbuffers. depth='trace' does not need it"
        ) from error


def with_lines(program: Any) -> Any:
    """The jaxpr with each equation's line as its innermost name scope, at any depth.

    A Pallas kernel has one more scope, with its flops.

    Returns:
        A jaxpr of the same kind, in which operators of `custom_partitioning` are calls of their
        functions on global arrays.
    """
    return _WithLines().program(program)


class _WithLines(JaxprRewriter):
    def equation(self, eqn: Any, context: Any) -> Iterator[Any]:
        if eqn.primitive.name == "custom_partitioning":
            eqn = eqn.replace(primitive=closed_call_p, params={"call_jaxpr": eqn.params["call"]})
        eqn = self.inside(eqn, context)
        line = line_of(eqn)
        scopes = [scope_of(line)] if line else []
        if eqn.primitive.name == "pallas_call":
            scopes.append(f"{KERNEL}{flops_of(eqn):.0f}")
        source = eqn.source_info
        for scope in scopes:
            source = source.replace(name_stack=source.name_stack.extend(scope))
        yield eqn.replace(source_info=source) if scopes else eqn


def on_abstract_mesh(program: Any) -> Any:
    """The jaxpr with abstract meshes in all shardings and `shard_map`s, at any depth.

    A trace has shardings over the caller's mesh. Lowering needs the client of that mesh's devices,
    which described devices do not have; an abstract mesh has no devices.

    Returns:
        A jaxpr of the same kind; the argument is not changed.

    Example:
        >>> import jax.numpy as jnp
        >>> from isoshard.planner.machine.topologies import topology
        >>> mesh = topology("v5e:2x4").mesh((2, 4), ("x", "y"))
        >>> row = NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        >>> constrain = lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), row)
        >>> program = on_abstract_mesh(jax.make_jaxpr(constrain)(jnp.ones(8)))
        >>> program.eqns[-1].params["sharding"].mesh is mesh.abstract_mesh
        True
    """
    return _OnAbstractMesh().program(program)


def abstract_layout(layout: NamedSharding) -> NamedSharding:
    """The sharding over the abstract mesh."""
    if not isinstance(layout.mesh, Mesh):
        return layout
    return NamedSharding(layout.mesh.abstract_mesh, layout.spec, memory_kind=layout.memory_kind)


class _OnAbstractMesh(JaxprRewriter):
    def value(self, value: Any, context: Any) -> Any:
        if isinstance(value, Mesh):
            return value.abstract_mesh
        if isinstance(value, NamedSharding):
            return abstract_layout(value)
        return super().value(value, context)


def _pairs(step: TracedStep) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The order of results in which JAX pairs each with the input it replaces; and those inputs."""
    replacing: dict[int, int] = {}
    for at, result in enumerate(step.results):
        source = result.replaces
        if source is not None and source not in replacing and _same(step, source, at):
            replacing[source] = at
    donated = tuple(sorted(replacing))
    first = [replacing[source] for source in donated]
    rest = [at for at in range(len(step.results)) if at not in set(first)]
    return (*first, *rest), donated


def _same(step: TracedStep, source: int, result: int) -> bool:
    """Whether a result's memory can be that of an input."""
    arguments, new = step.program.in_avals[source], step.program.out_avals[result]
    return (arguments.shape, arguments.dtype) == (new.shape, new.dtype)


def _in_order(values: list[Any], order: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(values[at] for at in order)


def _abstract(layout: NamedSharding | None) -> NamedSharding | None:
    return None if layout is None else abstract_layout(layout)
