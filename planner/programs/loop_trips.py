"""How often a loop of HLO runs: what XLA notes, or what its condition and its carry say.

Programs of TPUs have no note. Their loops count: an element of the carry starts at a constant,
grows by a constant in each run, and is compared with a constant or another element.
"""

from __future__ import annotations

import re

from isoshard.core.runtime.hlo_text import Computation, HloModule, Instruction

_NOTED = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SAME = frozenset(("copy", "bitcast", "convert", "copy-done", "copy-start", "reshape"))


def trips(module: HloModule, inside: Computation, loop: Instruction) -> int:
    """How often a loop runs; 1 if that is not known.

    Args:
        module: its program.
        inside: the computation that the loop stands in.
        loop: an instruction `while`.
    """
    noted = _NOTED.search(loop.attributes)
    if noted:
        return int(noted[1])
    body, condition = (module.computations[name] for name in _parts(loop))
    test = _test(module, condition)
    if test is None:
        return 1
    counter, limit = test
    start = _number(inside, _carried(inside, loop, counter))
    if isinstance(limit, tuple):
        stop = _number(inside, _carried(inside, loop, limit[0]))
    else:
        stop = limit
    step = _step(module, body, counter)
    if start is None or stop is None or not step:
        return 1
    return max(0, -(-(stop - start) // step))


def _parts(loop: Instruction) -> tuple[str, str]:
    found = dict(re.findall(r"\b(body|condition)=%?([\w.\-]+)", loop.attributes))
    return found["body"], found["condition"]


def _test(module: HloModule, condition: Computation) -> tuple[int, int | tuple[int]] | None:
    """The element that counts, and the number, or the (element,), that it stays below."""
    inside, root = condition, condition.root
    given: dict[str, Instruction] = {}
    if root.opcode == "fusion":
        inside = module.computations[root.called[0]]
        outer = [condition.instructions[name] for name in root.operands]
        given = {p.name: one for p, one in zip(inside.parameters, outer, strict=True)}
        root = inside.root
    if root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    left, right = (_behind(inside, given, name) for name in root.operands)
    counter = _index(left)
    if counter is None:
        return None
    if right.opcode == "constant":
        return counter, int(right.arguments)
    limit = _index(right)
    return None if limit is None else (counter, (limit,))


def _behind(inside: Computation, given: dict[str, Instruction], name: str) -> Instruction:
    one = inside.instructions[name]
    while one.name in given or (one.opcode in _SAME and one.operands[0] in inside.instructions):
        one = given[one.name] if one.name in given else inside.instructions[one.operands[0]]
    return one


def _index(one: Instruction) -> int | None:
    found = re.search(r"index=(\d+)", one.attributes)
    return int(found[1]) if found and one.opcode == "get-tuple-element" else None


def _carried(inside: Computation, loop: Instruction, index: int) -> Instruction | None:
    """What the loop is given for an element of its carry."""
    start = inside.instructions[loop.operands[0]]
    if start.opcode != "tuple" or index >= len(start.operands):
        return None
    return inside.instructions[start.operands[index]]


def _number(inside: Computation, one: Instruction | None) -> int | None:
    while one is not None and one.opcode in _SAME and one.operands:
        one = inside.instructions.get(one.operands[0])
    if one is None or one.opcode != "constant":
        return None
    return int(one.arguments) if re.fullmatch(r"-?\d+", one.arguments) else None


def _step(module: HloModule, body: Computation, index: int) -> int:
    """By how much an element of the carry grows in one run."""
    if body.root.opcode != "tuple":
        return 1
    return _grown(module, body, body.root.operands[index], 0) or 1


def _grown(module: HloModule, inside: Computation, name: str, depth: int) -> int:
    one = inside.instructions.get(name)
    if one is None or depth > 8:
        return 0
    if one.opcode in _SAME:
        return _grown(module, inside, one.operands[0], depth + 1)
    if one.opcode == "add":
        parts = [inside.instructions[operand] for operand in one.operands]
        fixed = [part for part in parts if part.opcode == "constant"]
        rest = [part for part in parts if part.opcode != "constant"]
        numbers = [number for number in (_number(inside, part) for part in fixed) if number]
        return sum(numbers) + sum(_grown(module, inside, part.name, depth + 1) for part in rest)
    if one.opcode == "fusion":
        within = module.computations[one.called[0]]
        grown = _grown(module, within, within.root.name, depth + 1)
        outer = [_grown(module, inside, operand, depth + 1) for operand in one.operands]
        return grown + sum(outer)
    return 0
