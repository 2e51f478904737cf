"""What compilers of TPUs and GPUs make of collectives, and the host's compiler does not.

A reduction of which each device keeps its slice becomes a reduce-scatter. Reductions among the same
devices whose results are added become one of the sum. A maximum of widened bfloat16 is sent as
bfloat16 (TPU), and so is what is gathered or moved (GPU: collective_quantizer.cc of XLA).

Not made here: what libtpu does to a gather that only a product reads, or a reduce-scatter that only
a product makes (it multiplies part by part while it sends parts around, by collective-permutes);
and joining several small collectives into one of several arrays, which changes how many there are,
not what they send.
"""

from __future__ import annotations

import math

from isoshard.core.runtime.hlo_collectives import groups_of
from isoshard.core.runtime.hlo_text import Computation, HloModule, Instruction

_RESHAPED = frozenset(("bitcast", "copy", "reshape", "transpose", "convert"))
_PASSED = frozenset(("bitcast", "copy", "dynamic-slice", "reshape", "transpose"))
"""What may stand between a reduction and the sum: of slices, each device adds up its own."""


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


_MOVED = frozenset(("all-gather", "all-to-all", "collective-permute"))


def is_narrowed(module: HloModule, inside: Computation, one: Instruction, target: str) -> bool:
    """Whether a compiler sends bfloat16, since all that a collective is of was widened from it.

    Args:
        module: the program.
        inside: the computation that the collective stands in.
        one: the collective.
        target: "tpu": it does so with a maximum; "gpu": with what is gathered or moved.
    """
    maker = inside.instructions.get(one.operands[0]) if len(one.operands) == 1 else None
    if maker is None or maker.opcode != "fusion":
        return False
    if target == "gpu" and (one.opcode not in _MOVED or len(inside.users[maker.name]) > 1):
        return False
    if target == "tpu":
        body = module.computations.get(one.called[0]) if one.called else None
        if body is None or body.root.opcode not in ("maximum", "minimum"):
            return False
    inner = module.computations[maker.called[0]]
    row, passed = inner.root, {*_PASSED, "reduce"} if target == "tpu" else _PASSED
    while row.opcode in passed and row.operands[0] in inner.instructions:
        row = inner.instructions[row.operands[0]]
    if row.opcode != "convert" or row.arrays[0].dtype != "f32":
        return False
    return inner.instructions[row.operands[0]].arrays[0].dtype == "bf16"


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
    groups = {operand: groups_of(inside.instructions[operand].text) for operand in given.values()}
    start = next((one for one, operand in given.items() if operand == name), None)
    found: frozenset[str] = frozenset()
    while start is not None:
        users = body.users[start]
        while len(users) == 1 and users[0].opcode in _PASSED:
            users = body.users[users[0].name]
        if len(users) != 1 or users[0].opcode != "add":
            break
        start = users[0].name
        terms = _terms(body, start, given)
        if terms is None or len({groups[one] for one in terms}) > 1:
            break
        found = terms
    return found


def _terms(inside: Computation, name: str, given: dict[str, str]) -> frozenset[str] | None:
    """The reductions that a value is the sum of; None if there are other things in it."""
    if name in given:
        return frozenset((given[name],))
    one = inside.instructions[name]
    if one.opcode in _PASSED:
        return _terms(inside, one.operands[0], given)
    if one.opcode != "add":
        return None
    parts = [_terms(inside, operand, given) for operand in one.operands]
    return None if None in parts else frozenset().union(*(part for part in parts if part))
