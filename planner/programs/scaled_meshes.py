"""Meshes larger than a process of the host can have: partitioned at two smaller sizes, and scaled.

With fewer devices along one axis, and arrays of the same global shapes, a shard of what is split
along that axis grows by the same factor, and all else is unchanged. So each quantity of a program
(bytes of a value, flops of a product) is `a + b / n` in the size `n` of the axis, and two programs,
for two sizes, determine `a` and `b`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from isoshard.core.kit import JaxprRewriter, TracedStep
from isoshard.planner.costs.device_program import DeviceOp, DeviceProgram
from isoshard.planner.reports.report import LiveArray

from .targets import PlanningError

_UNLIKE = 0.01
"""The share of all bytes sent that collectives of only one of the two programs may send."""

_OTHERWISE = "Estimate with depth='compile' (the target's topology has as many) or depth='trace'"


@dataclasses.dataclass(frozen=True)
class ScaledStep:
    """A step on fewer devices.

    Attributes:
        step: the same program, on a smaller mesh.
        axis: the smaller mesh axis.
        size: of the axis.
    """

    step: TracedStep
    axis: str
    size: int


def scaled_down(step: TracedStep, most: int) -> tuple[ScaledStep, ScaledStep]:
    """The step on two smaller meshes: the largest that fits along one axis, and half of it.

    Raises:
        PlanningError: no axis is long enough, or the program has a `shard_map`, whose shapes
            follow from the mesh.
    """
    sizes = dict(step.mesh.shape)
    for axis in sorted(sizes, key=lambda name: -sizes[name]):
        size = sizes[axis]
        while size % 2 == 0 and math.prod(sizes.values()) // sizes[axis] * size > most:
            size //= 2
        if size % 2 == 0 and size > 2 and math.prod(sizes.values()) // sizes[axis] * size <= most:
            return _on(step, axis, size), _on(step, axis, size // 2)
    raise PlanningError(
        f"{step.name}: a mesh of {step.mesh.size} devices is too large for this host, which can "
        f"have {most}, and no axis of {sizes} can be halved until it fits. {_OTHERWISE}"
    )


def _on(step: TracedStep, axis: str, size: int) -> ScaledStep:
    """The step on a mesh with `size` devices along an axis."""
    old = step.mesh
    index = old.axis_names.index(axis)
    mesh = Mesh(
        old.devices.take(range(size), axis=index), old.axis_names, axis_types=old.axis_types
    )
    change = _OnOtherMesh(mesh.abstract_mesh, step.name)

    def moved(layout: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, layout.spec, memory_kind=layout.memory_kind)

    return ScaledStep(
        dataclasses.replace(
            step,
            program=change.program(step.program),
            inputs=tuple(
                dataclasses.replace(leaf, sharding=moved(leaf.sharding)) for leaf in step.inputs
            ),
            results=tuple(
                dataclasses.replace(result, sharding=result.sharding and moved(result.sharding))
                for result in step.results
            ),
            mesh=mesh,
        ),
        axis,
        size,
    )


class _OnOtherMesh(JaxprRewriter):
    """Replaces the abstract meshes of a program."""

    def __init__(self, mesh: AbstractMesh, name: str):
        super().__init__()
        self._mesh = mesh
        self._name = name

    def value(self, value: Any, context: Any) -> Any:
        if isinstance(value, Mesh | AbstractMesh):
            return self._mesh
        if isinstance(value, NamedSharding):
            return NamedSharding(self._mesh, value.spec, memory_kind=value.memory_kind)
        return super().value(value, context)

    def equation(self, eqn: Any, context: Any) -> Iterator[Any]:
        if eqn.primitive.name == "shard_map":
            raise PlanningError(
                f"{self._name}: a part of it is written for each device by jax.shard_map, so it "
                f"cannot be partitioned for fewer devices than it is planned for. {_OTHERWISE}"
            )
        yield self.inside(eqn, context)


def scaled_back(
    large: DeviceProgram, small: DeviceProgram, sizes: tuple[int, int], size: int, step: TracedStep
) -> DeviceProgram:
    """The program for the whole mesh, from those for two smaller ones.

    Raises:
        PlanningError: the two have different collectives.
    """

    def scale(at_large: float, at_small: float) -> float:
        return _scaled(at_large, at_small, sizes, size)

    many, few = _sums(large.ops), _sums(small.ops)
    sent = sum(leaf.sent for leaf in many.values())
    alone = sum(leaf.sent for key, leaf in many.items() if key not in few)
    if alone > sent * _UNLIKE:
        raise PlanningError(
            f"{step.name}: the partitioner shards it differently on {sizes[0]} and on {sizes[1]} "
            f"devices along one axis, so its costs cannot be scaled. {_OTHERWISE}"
        )
    factors = {
        key: _OpTotals(
            *(_factor(a, b, scale) for a, b in zip(leaf, few.get(key, leaf), strict=True))
        )
        for key, leaf in many.items()
    }
    ops = tuple(_times(op, factors[_key(op)]) for op in large.ops)
    least = dict.fromkeys(("parameter", "buffer", "optimizer", "input"), 0)
    for leaf in step.inputs:
        least[leaf.role if leaf.role in least else "input"] += leaf.bytes_per_device
    peak = max(
        round(scale(large.memory.peak, small.memory.peak)), max((op.live for op in ops), default=0)
    )
    names = {leaf.name: leaf for leaf in small.memory.largest}
    arrays = [
        _array(leaf, names[leaf.name], scale) for leaf in large.memory.largest if leaf.name in names
    ]
    memory = dataclasses.replace(
        large.memory,
        parameters=least["parameter"],
        buffers=least["buffer"],
        optimizer=least["optimizer"],
        inputs=least["input"],
        peak=peak,
        activations=max(0, peak - sum(least.values())),
        largest=tuple(sorted(arrays, key=lambda leaf: -leaf.bytes)),
    )
    return dataclasses.replace(large, ops=ops, memory=memory)


class _OpTotals(NamedTuple):
    """The totals of operations with the same key."""

    flops: float = 0.0
    bytes: float = 0.0
    sent: float = 0.0
    live: float = 0.0


Key = tuple[str, str, str, tuple[str, ...], int]


def _key(op: DeviceOp) -> Key:
    """The key that equal operations of both programs have.

    A collective over more devices may need more slices of its operand; so operations other than
    collectives have one key for each line.
    """
    name = op.name if op.is_collective else ("product" if op.flops else "")
    return name, op.line, op.dtype, op.axes, op.times


def _sums(ops: tuple[DeviceOp, ...]) -> dict[Key, _OpTotals]:
    sums: dict[Key, _OpTotals] = {}
    for op in ops:
        total = sums.get(_key(op), _OpTotals())
        sums[_key(op)] = _OpTotals(
            total.flops + op.flops,
            total.bytes + op.bytes,
            total.sent + op.sent,
            max(total.live, op.live),
        )
    return sums


def _factor(large: float, small: float, scale: Callable[[float, float], float]) -> float:
    return scale(large, small) / large if large else 1.0


def _times(op: DeviceOp, factors: _OpTotals) -> DeviceOp:
    return dataclasses.replace(
        op,
        flops=op.flops * factors.flops,
        bytes=op.bytes * factors.bytes,
        sent=round(op.sent * factors.sent),
        live=round(op.live * factors.live),
    )


def _scaled(large: float, small: float, sizes: tuple[int, int], size: int) -> float:
    """The value at a size of `a + b / n`, from those at two sizes."""
    coefficient = (small - large) / (1 / sizes[1] - 1 / sizes[0])
    return max(0.0, large + coefficient * (1 / size - 1 / sizes[0]))


def _array(array: LiveArray, other: LiveArray, scale: Callable[[float, float], float]) -> LiveArray:
    shape = tuple(round(scale(a, b)) for a, b in zip(array.shape, other.shape, strict=False))
    return dataclasses.replace(array, shape=shape, bytes=round(scale(array.bytes, other.bytes)))
