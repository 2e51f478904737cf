"""Sums across devices that are only added: the terms are added first, and sent once.

XLA's compilers for TPUs and GPUs turn `all-reduce(a) + all-reduce(b)` into `all-reduce(a + b)`, and
reduce-scatters likewise: the gradient of what three products read (query, key, value) is one
all-reduce, not three.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .local_program import LocalOp, LocalProgram, LocalScope

_ADDS = frozenset(("add", "add_any"))
_SUMS = frozenset(("all-reduce", "reduce-scatter"))


def sum_first(program: LocalProgram) -> None:
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
        for one in op.operands:
            readers[one] = readers.get(one, 0) + 1
    sums = {
        op.results[0]: op
        for op in scope.ops
        if op.name in _SUMS and readers.get(op.results[0]) == 1
    }
    gone: set[int] = set()
    ops: list[LocalOp] = []
    for op in scope.ops:
        sent: list[LocalOp] = []
        while terms := _terms(program, op, sums):
            gone.update(op.operands)
            first, (result,) = terms[0], op.results
            alike = result if first.name == "all-reduce" else first.operands[0]
            partial = program.value(program.shapes[alike], 0, program.dtypes[result])
            program.bytes[partial] = program.bytes[alike]
            operands = tuple([one.operands[0] for one in terms])
            op = dataclasses.replace(op, operands=operands, results=(partial,))
            sent.append(dataclasses.replace(first, operands=(partial,), results=(result,)))
            program.makers[partial], program.makers[result] = op, sent[-1]
            if readers.get(result, 1) == 1:  # what is new here is read once
                sums[result] = sent[-1]
        ops += [op, *reversed(sent)]
    scope.ops = [op for op in ops if op.name not in _SUMS or op.results[0] not in gone]


def _terms(program: LocalProgram, op: LocalOp, sums: Mapping[int, LocalOp]) -> list[LocalOp]:
    """The sums across devices that an operation adds, if they are of one kind; else none."""
    terms = [sums[one] for one in op.operands if one in sums]
    if op.name not in _ADDS or not terms or len(terms) < len(op.operands):
        return []
    kinds = {(one.name, one.axes, program.bytes[one.operands[0]]) for one in terms}
    return terms if len(kinds) == 1 and terms[0].equation is not None else []
