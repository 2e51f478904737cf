"""One device's program: values of its shards by number, and operations on them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .factors import Split
from .partitioning import ReshardingStep


@dataclasses.dataclass(slots=True, eq=False)
class LocalOp:
    """One operation of one device.

    Attributes:
        name: of the primitive, or of a collective its kind as HLO calls it.
        equation: that it comes from; None if from none.
        operands: numbers of local values.
        results: likewise.
        flops: of one device.
        axes: of a collective, the numbers of the mesh axes.
        sent: of a collective, bytes.
        inner: of an all-gather, as of `ReshardingStep`.
        bodies: of a loop or branches.
    """

    name: str
    equation: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    flops: float = 0.0
    axes: Split = ()
    sent: int = 0
    bodies: tuple[LocalScope, ...] = ()
    inner: bool = False


def exchange_op(step: ReshardingStep, equation: Any, operand: int, result: int) -> LocalOp:
    """A collective between two layouts of a value."""
    axes, sent = step.axes, step.sent
    return LocalOp(step.kind, equation, (operand,), (result,), 0.0, axes, sent, inner=step.inner)


@dataclasses.dataclass(slots=True, eq=False)
class LocalScope:
    """Operations of one device that run one after the other.

    Attributes:
        ops: in the program's order.
        kind: as of `flat_program.BodyScope`.
        times: how often it runs each time that it is met.
        results: local values that are alive at its end.
        carried: (result, input) that are one value from run to run.
        outside: local value inside -> the one outside that it is the same as.
    """

    ops: list[LocalOp]
    kind: str
    times: int
    results: tuple[int, ...] = ()
    carried: tuple[tuple[int, int], ...] = ()
    outside: dict[int, int] = dataclasses.field(default_factory=dict)


class LocalProgram:
    """Values of one device by number, and what it does.

    Attributes:
        bytes: of each value on one device.
        shapes: of one device's block.
        dtypes: names.
        makers: of each value the operation that makes it; None of inputs.
        inputs: numbers of local values.
        results: likewise.
        scope: the operations.
    """

    def __init__(self) -> None:
        """Nothing in it yet."""
        self.bytes: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.dtypes: list[str] = []
        self.makers: list[LocalOp | None] = []
        self.inputs: tuple[int, ...] = ()
        self.results: tuple[int, ...] = ()
        self.scope = LocalScope([], "step", 1)

    def value(self, shape: tuple[int, ...], itemsize: int, dtype: str) -> int:
        """Add a value."""
        self.bytes.append(math.prod(shape) * itemsize)
        self.shapes.append(shape)
        self.dtypes.append(dtype)
        self.makers.append(None)
        return len(self.bytes) - 1

    def copy(self, value: int) -> int:
        """Add a value like another one."""
        result = self.value(self.shapes[value], 0, self.dtypes[value])
        self.bytes[result] = self.bytes[value]
        self.makers[result] = self.makers[value]
        return result


def as_read(op: LocalOp) -> LocalOp:
    """A loop with the operands that its bodies read."""
    if op.bodies[0].kind not in ("scan", "while"):
        return op
    read = {one for body in op.bodies for one in _read(body)}
    for body in op.bodies:
        body.outside = {
            inner: outer for inner, outer in body.outside.items() if inner in read or inner == outer
        }
        read.update(body.outside.values())
    return dataclasses.replace(
        op, operands=tuple([operand for operand in op.operands if operand in read])
    )


def _read(scope: LocalScope) -> set[int]:
    """What the operations of a scope read, and what it carries and gives."""
    value = {operand for op in scope.ops for operand in op.operands}
    value.update(scope.results, *scope.carried)
    for op in scope.ops:
        for body in op.bodies:
            value |= _read(body)
            value.update(body.outside.values())
    return value
