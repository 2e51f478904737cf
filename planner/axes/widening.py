"""Narrow floats computed in float32, as XLA does it on hosts.

Its kernels for CPUs know no bfloat16: each operation reads float32, and what it makes is rounded
to bfloat16 again. Between kernels a value is stored as it is rounded, but products and collectives
want what they read in float32, in memory. Conversions of what a loop does not change stand before
the loop: of a stack of layers, all layers are converted at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from isoshard.core.runtime.flops import is_product

from .common_expressions import CONSTANT
from .local_program import LocalOp, LocalProgram, LocalScope, as_read

_AS_IT_IS = frozenset(
    "convert_element_type stack reshape squeeze expand_dims name optimization_barrier copy "
    "sharding_constraint reshard stop_gradient device_put layout_constraint result reorder "
    "transpose".split()
)
"""Operations that take either kind."""

WIDE = "float32"
_ITEMSIZE = 4


def widen(program: LocalProgram, narrow: Collection[str]) -> None:
    """Compute some dtypes in float32.

    Args:
        program: of one device; it is changed.
        narrow: names of the dtypes.
    """
    if narrow:
        _Widening(program, frozenset(narrow)).scope(program.scope, None)


class _Widening:
    def __init__(self, program: LocalProgram, narrow: frozenset[str]) -> None:
        self.program = program
        self.narrow = narrow

    def scope(self, scope: LocalScope, above: Callable[[int, LocalOp], int] | None) -> None:
        ops: list[LocalOp] = []
        wide: dict[int, int] = {}
        whole: set[int] = set()
        starts = {start for _, start in scope.carried}
        mine = starts | {one for op in scope.ops for one in op.results}

        def widened(value: int, reader: LocalOp) -> int:
            """The float32 of a value, and where it is made if it is not yet."""
            if value == CONSTANT or self.program.dtypes[value] not in self.narrow:
                return value
            if value in wide and (reader.axes or value not in whole):
                return wide[value]
            outer = scope.outside.get(value, value) if value not in starts else value
            if above is not None and outer != CONSTANT and (outer != value or value not in mine):
                found = above(outer, reader)
                scope.outside[found] = found
            else:
                found = self._as(value, WIDE, _ITEMSIZE)
                self._convert(ops, reader, value, found)
            wide[value] = found
            whole.discard(value)
            return found

        for op in scope.ops:
            for body in op.bodies:
                self.scope(body, widened if body.kind in ("scan", "while") else None)
            if op.bodies:
                ops.append(as_read(op))
                continue
            if op.name in _AS_IT_IS:
                ops.append(op)
                continue
            operands = tuple([widened(one, op) for one in op.operands])
            results = tuple([self._result(one) for one in op.results])
            if operands == op.operands and results == op.results:
                ops.append(op)
                continue
            made = dataclasses.replace(op, operands=operands, results=results)
            if op.axes and results != op.results:
                bytes_ = self.program.bytes
                made.sent = op.sent * bytes_[results[0]] // max(1, bytes_[op.results[0]])
            ops.append(made)
            for old, new in zip(op.results, results, strict=True):
                self.program.makers[new] = made
                if old != new:
                    self._convert(ops, op, new, old)
                    if op.axes or is_product(op.name):
                        wide[old] = new
                        whole.add(old)
        scope.ops = ops

    def _result(self, value: int) -> int:
        narrow = self.program.dtypes[value] in self.narrow
        return self._as(value, WIDE, _ITEMSIZE) if narrow else value

    def _as(self, value: int, dtype: str, itemsize: int) -> int:
        return self.program.value(self.program.shapes[value], itemsize, dtype)

    def _convert(self, ops: list[LocalOp], reader: LocalOp, value: int, new: int) -> None:
        made = LocalOp("convert_element_type", reader.equation, (value,), (new,))
        ops.append(made)
        self.program.makers[new] = made
