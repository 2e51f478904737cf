"""Rewrites of the per-device program: dtype promotion on hosts, reassociated all-reduces.

XLA's kernels for CPUs have no bfloat16 (`FloatNormalization`, `AllReducePromotion`): each operation
reads float32, and its result is rounded to bfloat16. Between kernels a value is stored as rounded,
but products and collectives read float32 from memory. Conversions of what a loop does not change
run before the loop: of a stack of layers, all layers are converted at once.

XLA's compilers for TPUs and GPUs turn `all-reduce(a) + all-reduce(b)` into `all-reduce(a + b)`, and
reduce-scatters too (`AllReduceReassociate`, `ReduceScatterReassociate`): the gradient of what three
products read (query, key, value) is one all-reduce, not three.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

from isoshard.core.kit import is_product

from .flat_program import CONSTANT
from .local_program import LocalOp, LocalProgram, LocalScope, as_read

_ANY_DTYPE = frozenset(
    "convert_element_type stack reshape squeeze expand_dims name optimization_barrier copy "
    "sharding_constraint reshard stop_gradient device_put layout_constraint result reorder "
    "transpose".split()
)
"""Operations that take any dtype."""

WIDE = "float32"
_ITEMSIZE = 4


def promote_floats(program: LocalProgram, narrow: Collection[str]) -> None:
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
        full: set[int] = set()
        starts = {start for _, start in scope.carried}
        written = starts | {result for op in scope.ops for result in op.results}

        def widened(value: int, reader: LocalOp) -> int:
            """The float32 of a value; converted here, or outside of the loop."""
            if value == CONSTANT or self.program.dtypes[value] not in self.narrow:
                return value
            if value in wide and (reader.axes or value not in full):
                return wide[value]
            outer = scope.outside.get(value, value) if value not in starts else value
            if above is not None and outer != CONSTANT and (outer != value or value not in written):
                converted = above(outer, reader)
                scope.outside[converted] = converted
            else:
                converted = self._as(value, WIDE, _ITEMSIZE)
                self._convert(ops, reader, value, converted)
            wide[value] = converted
            full.discard(value)
            return converted

        for op in scope.ops:
            for body in op.bodies:
                self.scope(body, widened if body.kind in ("scan", "while") else None)
            if op.bodies:
                ops.append(as_read(op))
                continue
            if op.name in _ANY_DTYPE:
                ops.append(op)
                continue
            operands = tuple([widened(operand, op) for operand in op.operands])
            results = tuple([self._result(result) for result in op.results])
            if operands == op.operands and results == op.results:
                ops.append(op)
                continue
            widened_op = dataclasses.replace(op, operands=operands, results=results)
            if op.axes and results != op.results:
                bytes_ = self.program.bytes
                widened_op.sent = op.sent * bytes_[results[0]] // max(1, bytes_[op.results[0]])
            ops.append(widened_op)
            for old, new in zip(op.results, results, strict=True):
                self.program.makers[new] = widened_op
                if old != new:
                    self._convert(ops, op, new, old)
                    if op.axes or is_product(op.name):
                        wide[old] = new
                        full.add(old)
        scope.ops = ops

    def _result(self, value: int) -> int:
        narrow = self.program.dtypes[value] in self.narrow
        return self._as(value, WIDE, _ITEMSIZE) if narrow else value

    def _as(self, value: int, dtype: str, itemsize: int) -> int:
        return self.program.value(self.program.shapes[value], itemsize, dtype)

    def _convert(self, ops: list[LocalOp], reader: LocalOp, value: int, new: int) -> None:
        op = LocalOp("convert_element_type", reader.equation, (value,), (new,))
        ops.append(op)
        self.program.makers[new] = op


_ADDS = frozenset(("add", "add_any"))
_SUMS = frozenset(("all-reduce", "reduce-scatter"))


def reassociate_sums(program: LocalProgram) -> None:
    """Add before sending, in each scope.

    Args:
        program: of one device; it is changed.
    """
    _sum_first(program, program.scope)


def _sum_first(program: LocalProgram, scope: LocalScope) -> None:
    readers: dict[int, int] = dict.fromkeys(scope.results, 2)
    for op in scope.ops:
        for body in op.bodies:
            _sum_first(program, body)
            for outer in body.outside.values():
                readers[outer] = 2
        for operand in op.operands:
            readers[operand] = readers.get(operand, 0) + 1
    sums = {
        op.results[0]: op
        for op in scope.ops
        if op.name in _SUMS and readers.get(op.results[0]) == 1
    }
    removed: set[int] = set()
    ops: list[LocalOp] = []
    for op in scope.ops:
        sent: list[LocalOp] = []
        while terms := _terms(program, op, sums):
            removed.update(op.operands)
            first, (result,) = terms[0], op.results
            same = result if first.name == "all-reduce" else first.operands[0]
            partial = program.value(program.shapes[same], 0, program.dtypes[result])
            program.bytes[partial] = program.bytes[same]
            operands = tuple([operand.operands[0] for operand in terms])
            op = dataclasses.replace(op, operands=operands, results=(partial,))
            sent.append(dataclasses.replace(first, operands=(partial,), results=(result,)))
            program.makers[partial], program.makers[result] = op, sent[-1]
            if readers.get(result, 1) == 1:  # what is new here is read once
                sums[result] = sent[-1]
        ops += [op, *reversed(sent)]
    scope.ops = [op for op in ops if op.name not in _SUMS or op.results[0] not in removed]


def _terms(program: LocalProgram, op: LocalOp, sums: Mapping[int, LocalOp]) -> list[LocalOp]:
    """The sums across devices that an operation adds, if they are of one kind; else none."""
    terms = [sums[operand] for operand in op.operands if operand in sums]
    if op.name not in _ADDS or not terms or len(terms) < len(op.operands):
        return []
    kinds = {(term.name, term.axes, program.bytes[term.operands[0]]) for term in terms}
    return terms if len(kinds) == 1 and terms[0].equation is not None else []
