"""A traced step as bytes that another process compiles: StableHLO with layouts and donations.

The program names no device: its meshes are abstract, so 4,096 devices are as good as eight. Of
places in the source only the user's lines are kept, as name scopes
(`isoshard.core.traced.source_lines`), so that the same step gives the same bytes wherever
it is estimated from.

Operators that tell XLA's partitioner how to split them (`custom_partitioning`) do that in a
function of the process that compiles. The planner's process has none, so they are exported as what
they would tell it, where devices talk in that (`self_split`), and else as the operation on whole
arrays that they stand for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax import export
from jax.sharding import NamedSharding

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
from isoshard.planner.traced.platform_programs import abstract_layout, on_abstract_mesh

from .hlo_costs import KERNEL
from .self_split import answered
from .targets import CompilerMissingError, PlanningError


@dataclasses.dataclass(frozen=True)
class ExportedStep:
    """A step's program, ready to be compiled elsewhere.

    Attributes:
        data: `jax.export.Exported`, serialized.
        donated: numbers of the inputs whose memory results take.
        results: numbers of the step's results, in the order in which the program gives them.
        axes: the mesh's axes and their sizes, in order.
        axis_types: of each axis, as `jax.sharding.AxisType` names it.
        wide: 64-bit types are on.
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
        The program. JAX gives each result the first donated input of its shape and dtype; so
        results that replace an input stand first, in the order of those inputs.

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
    program = with_lines(on_abstract_mesh(answered(step)))
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
            "which cannot be imported here: pip install flatbuffers. depth='trace' does without"
        ) from error


def with_lines(program: Any) -> Any:
    """The same jaxpr with each equation's line as its innermost name scope, at any depth.

    Of a kernel of Pallas there is one more, which says what it computes.

    Returns:
        A jaxpr of the same kind, in which operators of `custom_partitioning` are calls of what
        they stand for.
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


def _pairs(step: TracedStep) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The order of results in which each meets the input it replaces; and those inputs."""
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
