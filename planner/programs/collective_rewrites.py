"""What compilers of TPUs and GPUs make of collectives, and the host's compiler does not.

A reduction of which each device keeps its slice becomes a reduce-scatter. Reductions among the same
devices whose results are added become one of the sum. A maximum of widened bfloat16 is sent as
bfloat16 (TPU), and so is what is gathered or moved (GPU: collective_quantizer.cc of XLA).

Not made here: what libtpu does to a gather that only a product reads, or a reduce-scatter that only
a product makes (it multiplies part by part while it sends parts around, by collective-permutes);
and joining several small collectives into one of several arrays, which changes how many there are,
not what they send.

Collectives of what a collective of the same kind gives: the compilers send them as one.

The partitioner sums along one axis of a mesh, and the result along the next one; XLA's compilers
for TPUs and GPUs sum along both at once (all_reduce_folder.cc). It gathers one dimension after the
other; libtpu gathers both at once.

>>> from isoshard.core.runtime.hlo_text import parsed
>>> module = parsed('''
... HloModule step
... ENTRY %main (a: f32[8]) -> f32[8] {
...   %a = f32[8]{0} parameter(0)
...   %b = f32[8]{0} all-reduce(%a), replica_groups={{0,1},{2,3}}, to_apply=%add
...   ROOT %c = f32[8]{0} all-reduce(%b), replica_groups={{0,2},{1,3}}, to_apply=%add
... }''')
>>> chained_as_one(module, "gpu").root.text
'f32[8]{0} all-reduce(%a), to_apply=%add, replica_groups={{0,1,2,3}}'
"""

from __future__ import annotations

import dataclasses
import math
import re

from isoshard.core.kit import Computation, Groups, HloModule, Instruction, groups_of

_RESHAPED = frozenset(("bitcast", "copy", "reshape", "transpose", "convert"))
_PASSED = frozenset(("bitcast", "copy", "dynamic-slice", "reshape", "transpose"))
"""What may stand between a reduction and the sum: of slices, each device adds up its own."""


def is_sliced(module: HloModule, inside: Computation, one: Instruction, count: int) -> bool:
    """Whether each device uses no more of a reduction than one slice of so many."""
    users = inside.users[one.name]
    if len(one.arrays) != 1 or not users or one is inside.root:
        return False
    prod = math.prod(one.arrays[0].sizes)
    return all(_takes(module, inside, user, one.name, prod, count) for user in users)


def _takes(
    module: HloModule, inside: Computation, user: Instruction, name: str, full: int, count: int
) -> bool:
    """Whether an instruction uses only one of `count` slices of an operand."""
    if user.opcode == "dynamic-slice":
        return math.prod(user.arrays[0].sizes) * count == full
    if user.opcode in _RESHAPED:
        inner = inside.users[user.name]
        return bool(inner) and all(
            _takes(module, inside, one, user.name, full, count) for one in inner
        )
    if user.opcode != "fusion":
        return False
    body = module.computations[user.called[0]]
    for parameter, operand in zip(body.parameters, user.operands, strict=True):
        inner = body.users[parameter.name]
        if operand == name and not (
            inner and all(_takes(module, body, one, parameter.name, full, count) for one in inner)
        ):
            return False
    return True


def joined_reductions(module: HloModule, inside: Computation) -> frozenset[str]:
    """Names of the reductions that another one stands for, as their results are only added."""
    sums: dict[str, set[frozenset[str]]] = {}
    reductions = [one for one in inside.instructions.values() if _is_reduction(one)]
    for reduction in reductions:
        for user in inside.users[reduction.name]:
            sums.setdefault(reduction.name, set()).add(_added(module, inside, user, reduction.name))
    result: set[str] = set()
    for several in {next(iter(ways)) for ways in sums.values() if len(ways) == 1}:
        if len(several) > 1 and all(sums.get(name) == {several} for name in several):
            result |= set(sorted(several)[1:])
    return frozenset(result)


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
        body, arguments = (
            inside,
            {n: n for n in user.operands if _is_reduction(inside.instructions[n])},
        )
    elif user.opcode == "fusion":
        body = module.computations[user.called[0]]
        rows = inside.instructions
        arguments = {
            parameter.name: operand
            for parameter, operand in zip(body.parameters, user.operands, strict=True)
            if operand in rows and _is_reduction(rows[operand])
        }
    else:
        return frozenset()
    groups = {
        operand: groups_of(inside.instructions[operand].text) for operand in arguments.values()
    }
    start = next((argument for argument, operand in arguments.items() if operand == name), None)
    frozenset_: frozenset[str] = frozenset()
    while start is not None:
        users = body.users[start]
        while len(users) == 1 and users[0].opcode in _PASSED:
            users = body.users[users[0].name]
        if len(users) != 1 or users[0].opcode != "add":
            break
        start = users[0].name
        terms = _terms(body, start, arguments)
        if terms is None or len({groups[term] for term in terms}) > 1:
            break
        frozenset_ = terms
    return frozenset_


def _terms(inside: Computation, name: str, arguments: dict[str, str]) -> frozenset[str] | None:
    """The reductions that a value is the sum of; None if there are other things in it."""
    if name in arguments:
        return frozenset((arguments[name],))
    one = inside.instructions[name]
    if one.opcode in _PASSED:
        return _terms(inside, one.operands[0], arguments)
    if one.opcode != "add":
        return None
    parts = [_terms(inside, operand, arguments) for operand in one.operands]
    return None if None in parts else frozenset().union(*(chunk for chunk in parts if chunk))


_KINDS = {"tpu": ("all-reduce", "all-gather"), "gpu": ("all-reduce",)}
_BETWEEN = frozenset(("bitcast", "copy", "transpose"))
_SAID = re.compile(r", replica_groups=.*?(?=, [a-z_]+=|$)")


def chained_as_one(module: HloModule, target: str) -> HloModule:
    """The same program with chains of collectives as one each."""
    computations = {
        name: _folded(module, computation, _KINDS[target])
        for name, computation in module.computations.items()
    }
    entry = computations[module.entry.name]
    return dataclasses.replace(module, computations=computations, entry=entry)


def _folded(module: HloModule, inside: Computation, kinds: tuple[str, ...]) -> Computation:
    rows = dict(inside.instructions)
    for one in inside.instructions.values():
        if one.opcode not in kinds or len(one.operands) != 1:
            continue
        between = _before(module, inside, one)
        first = rows.get(between[-1]) if between else None
        if first is None or not _alike(module, first, one):
            continue
        groups = _union(groups_of(first.text), groups_of(one.text))
        if groups:
            for name in between:
                del rows[name]
            join = ",".join(f"{{{','.join(map(str, group))}}}" for group in groups)
            attributes = f"{_SAID.sub('', one.attributes)}, replica_groups={{{join}}}"
            rows[one.name] = dataclasses.replace(
                one, operands=first.operands, arguments=first.arguments, attributes=attributes
            )
    if len(rows) == len(inside.instructions):
        return inside
    return Computation(inside.name, rows, rows[inside.root.name])


def _before(module: HloModule, inside: Computation, one: Instruction) -> list[str]:
    """The names of what a collective is of, up to another of its kind, read by nobody else."""
    before: list[str] = []
    while True:
        maker = inside.instructions.get(one.operands[0])
        if maker is None or len(inside.users[maker.name]) > 1 or maker is inside.root:
            return []
        before.append(maker.name)
        if not _only_moves(module, maker):
            return before
        one = maker


def _only_moves(module: HloModule, one: Instruction) -> bool:
    body = module.computations.get(one.called[0]) if one.opcode == "fusion" else None
    if body is None or len(one.operands) != 1:
        return one.opcode in _BETWEEN
    return all(row.opcode in {*_BETWEEN, "parameter"} for row in body.instructions.values())


def _alike(module: HloModule, first: Instruction, one: Instruction) -> bool:
    """Whether two collectives do the same."""
    if first.opcode != one.opcode or len(first.operands) != 1:
        return False
    called = [module.computations.get(name) for name in (*first.called, *one.called)]
    return len({body.root.opcode for body in called if body is not None}) < 2


def _union(first: Groups | None, second: Groups | None) -> Groups:
    """Who talks to whom by way of both."""
    of = {device: group for group in first or () for device in group}
    joined = {
        tuple(sorted({other for device in group for other in of.get(device, (device,))}))
        for group in second or ()
    }
    return tuple(sorted(joined)) if first else ()
