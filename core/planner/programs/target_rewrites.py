"""What compilers of TPUs and GPUs make of collectives, and the host's compiler does not.

A reduction of which each device keeps its slice becomes a reduce-scatter. Reductions among the same
devices whose results are added become one of the sum.
"""

from __future__ import annotations

import math
import re

from .hlo_text import Computation, HloModule, Instruction

_RESHAPED = frozenset(("bitcast", "copy", "reshape", "transpose", "convert"))
_GROUPS = re.compile(r"replica_groups=(\S+?\}|\[\S+\](?:T\([\d,]+\))?)(?:,|$)")


def is_sliced(module: HloModule, inside: Computation, one: Instruction, count: int) -> bool:
    """Whether each device uses no more of a reduction than one slice of so many.

    Args:
        module: its program.
        inside: the computation that the reduction stands in.
        one: the reduction.
        count: how many devices talk in it.
    """
    users = inside.users[one.name]
    if len(one.arrays) != 1 or not users or one is inside.root:
        return False
    whole = math.prod(one.arrays[0].sizes)
    return all(_takes(module, inside, user, one.name, whole, count) for user in users)


def _takes(
    module: HloModule, inside: Computation, user: Instruction, name: str, whole: int, count: int
) -> bool:
    """Whether an instruction uses only one of `count` slices of an operand."""
    if user.opcode == "dynamic-slice":
        return math.prod(user.arrays[0].sizes) * count == whole
    if user.opcode in _RESHAPED:
        inner = inside.users[user.name]
        return bool(inner) and all(
            _takes(module, inside, one, user.name, whole, count) for one in inner
        )
    if user.opcode != "fusion":
        return False
    body = module.computations[user.called[0]]
    for parameter, operand in zip(body.parameters, user.operands, strict=True):
        inner = body.users[parameter.name]
        if operand == name and not (
            inner and all(_takes(module, body, one, parameter.name, whole, count) for one in inner)
        ):
            return False
    return True


def joined_reductions(module: HloModule, inside: Computation) -> frozenset[str]:
    """Names of the reductions that another one stands for, as their results are only added.

    Args:
        module: the program.
        inside: the computation to look in.
    """
    sums: dict[str, set[frozenset[str]]] = {}
    reductions = [one for one in inside.instructions.values() if _is_reduction(one)]
    for one in reductions:
        for user in inside.users[one.name]:
            sums.setdefault(one.name, set()).add(_added(module, inside, user, one.name))
    found: set[str] = set()
    for several in {next(iter(ways)) for ways in sums.values() if len(ways) == 1}:
        if len(several) > 1 and all(sums.get(name) == {several} for name in several):
            found |= set(sorted(several)[1:])
    return frozenset(found)


def _is_reduction(one: Instruction) -> bool:
    return one.opcode in ("all-reduce", "all-reduce-start") and len(one.arrays) == 1


def _added(module: HloModule, inside: Computation, user: Instruction, name: str) -> frozenset[str]:
    """The reductions that a user adds up with one, before it does anything else with it."""
    if user.opcode == "add":
        body, given = inside, {n: n for n in user.operands if _is_reduction(inside.instructions[n])}
    elif user.opcode == "fusion":
        body = module.computations[user.called[0]]
        known = inside.instructions
        given = {
            parameter.name: operand
            for parameter, operand in zip(body.parameters, user.operands, strict=True)
            if operand in known and _is_reduction(known[operand])
        }
    else:
        return frozenset()
    groups = {operand: _groups(inside.instructions[operand]) for operand in given.values()}
    start = next((one for one, operand in given.items() if operand == name), None)
    found: frozenset[str] = frozenset()
    while start is not None:
        sums = [one for one in body.users[start] if one.opcode not in ("bitcast", "reshape")]
        if len(body.users[start]) != 1 or not sums or sums[0].opcode != "add":
            break
        start = sums[0].name
        terms = _terms(body, start, given)
        if terms is None or len({groups[one] for one in terms}) > 1:
            break
        found = terms
    return found


def _groups(one: Instruction) -> str:
    found = _GROUPS.search(one.attributes)
    return found[1] if found else ""


def _terms(inside: Computation, name: str, given: dict[str, str]) -> frozenset[str] | None:
    """The reductions that a value is the sum of; None if there are other things in it."""
    if name in given:
        return frozenset((given[name],))
    one = inside.instructions[name]
    if one.opcode != "add":
        return None
    parts = [_terms(inside, operand, given) for operand in one.operands]
    return None if None in parts else frozenset().union(*(part for part in parts if part))
