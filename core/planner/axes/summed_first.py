"""Sums across devices that are only added: the terms are added first, and sent once.

XLA's compilers for TPUs and GPUs turn `all-reduce(a) + all-reduce(b)` into `all-reduce(a + b)`: the
gradient of what three products read (query, key, value) is one all-reduce, not three.
"""

from __future__ import annotations

import dataclasses

from .local_program import LocalOp, LocalProgram, LocalScope

_ADDS = frozenset(("add", "add_any"))


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
        if op.name == "all-reduce" and readers.get(op.results[0]) == 1
    }
    gone: set[int] = set()
    ops: list[LocalOp] = []
    for op in scope.ops:
        terms = [sums.get(one) for one in op.operands]
        first = terms[0] if terms else None
        if (
            op.name not in _ADDS
            or first is None
            or any(one is None or one.axes != first.axes for one in terms)
            or first.equation is None
        ):
            ops.append(op)
            continue
        gone.update(op.operands)
        (result,) = op.results
        size, itemsize = program.shapes[result], program.bytes[result]
        partial = program.value(size, 0, program.dtypes[result])
        program.bytes[partial] = itemsize
        operands = tuple([one.operands[0] for one in terms if one is not None])
        added = dataclasses.replace(op, operands=operands, results=(partial,))
        summed = dataclasses.replace(first, operands=(partial,), results=(result,))
        ops += [added, summed]
        program.makers[partial], program.makers[result] = added, summed
        if readers.get(result) == 1:
            sums[result] = summed
    scope.ops = [op for op in ops if op.name != "all-reduce" or op.results[0] not in gone]
