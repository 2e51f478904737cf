"""One device's program: values of its shards by id, and operations on them."""

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
        equation: the jaxpr's; None if it comes from none.
        operands: ids of local values.
        results: likewise.
        flops: of one device.
        axes: of a collective, the ids of the mesh axes.
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
        times: how often it runs each time that its operation does.
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
    """Values of one device by id, and its operations.

    Attributes:
        bytes: of each value on one device.
        shapes: of one device's block.
        dtypes: names.
        makers: of each value the operation that computes it; None of inputs.
        inputs: ids of local values.
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
        copied = self.value(self.shapes[value], 0, self.dtypes[value])
        self.bytes[copied] = self.bytes[value]
        self.makers[copied] = self.makers[value]
        return copied


def as_read(op: LocalOp) -> LocalOp:
    """A loop without the operands that its bodies do not read."""
    if op.bodies[0].kind not in ("scan", "while"):
        return op
    read = {value for body in op.bodies for value in _read(body)}
    for body in op.bodies:
        body.outside = {
            inner: outer for inner, outer in body.outside.items() if inner in read or inner == outer
        }
        read.update(body.outside.values())
    return dataclasses.replace(
        op, operands=tuple([operand for operand in op.operands if operand in read])
    )


def _read(scope: LocalScope) -> set[int]:
    """Values that the operations of a scope read, that it carries and returns."""
    read = {operand for op in scope.ops for operand in op.operands}
    read.update(scope.results, *scope.carried)
    for op in scope.ops:
        for body in op.bodies:
            read |= _read(body)
            read.update(body.outside.values())
    return read
