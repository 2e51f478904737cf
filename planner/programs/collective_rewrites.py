"""Rewrites of collectives by the compilers of TPUs and GPUs, which the host's compiler lacks.

A reduction of which each device uses one slice becomes a reduce-scatter. Reductions over the same
devices whose results are added become one reduction of the sum. A maximum of widened bfloat16 is
sent as bfloat16 (TPU), and so are operands of gathers and permutes (GPU: collective_quantizer.cc of
XLA).

In other modules: libtpu's loops of products and collective-permutes (`windowed_products`), and
combining small collectives (`collective_combining`).

Chained collectives are folded into one: the partitioner sums along one axis of a mesh, and the
result along the next one; XLA's compilers for TPUs and GPUs sum along both at once
(all_reduce_folder.cc). It gathers one dimension after the other; libtpu gathers both at once.

>>> from isoshard.core.runtime.hlo_text import parsed
>>> module = parsed('''
... HloModule step
... ENTRY %main (a: f32[8]) -> f32[8] {
...   %a = f32[8]{0} parameter(0)
...   %b = f32[8]{0} all-reduce(%a), replica_groups={{0,1},{2,3}}, to_apply=%add
...   ROOT %c = f32[8]{0} all-reduce(%b), replica_groups={{0,2},{1,3}}, to_apply=%add
... }''')
>>> fold_chained(module, "gpu").root.text
'f32[8]{0} all-reduce(%a), to_apply=%add, replica_groups={{0,1,2,3}}'
"""

from __future__ import annotations

import dataclasses
import math
import re

from isoshard.core.kit import Computation, Groups, HloModule, Instruction, groups_of

_RESHAPED = frozenset(("bitcast", "copy", "reshape", "transpose", "convert"))
_PASSED = frozenset(("bitcast", "copy", "dynamic-slice", "reshape", "transpose"))
"""Opcodes allowed between a reduction and the sum: of slices, each device adds its own."""


def is_sliced(module: HloModule, inside: Computation, collective: Instruction, count: int) -> bool:
    """Whether each device uses only one of `count` slices of a reduction."""
    users = inside.users[collective.name]
    if len(collective.arrays) != 1 or not users or collective is inside.root:
        return False
    full = math.prod(collective.arrays[0].sizes)
    return all(_takes(module, inside, user, collective.name, full, count) for user in users)


def _takes(
    module: HloModule, inside: Computation, user: Instruction, name: str, full: int, count: int
) -> bool:
    """Whether an instruction uses only one of `count` slices of an operand."""
    if user.opcode == "dynamic-slice":
        return math.prod(user.arrays[0].sizes) * count == full
    if user.opcode in _RESHAPED:
        inner = inside.users[user.name]
        return bool(inner) and all(
            _takes(module, inside, reader, user.name, full, count) for reader in inner
        )
    if user.opcode != "fusion":
        return False
    body = module.computations[user.called[0]]
    for parameter, operand in zip(body.parameters, user.operands, strict=True):
        inner = body.users[parameter.name]
        if operand == name and not (
            inner
            and all(_takes(module, body, reader, parameter.name, full, count) for reader in inner)
        ):
            return False
    return True


def joined_reductions(module: HloModule, inside: Computation) -> frozenset[str]:
    """Names of the reductions that merge into another one, as their results are only added."""
    sums: dict[str, set[frozenset[str]]] = {}
    reductions = [row for row in inside.instructions.values() if _is_reduction(row)]
    for reduction in reductions:
        for user in inside.users[reduction.name]:
            sums.setdefault(reduction.name, set()).add(_added(module, inside, user, reduction.name))
    result: set[str] = set()
    for several in {next(iter(ways)) for ways in sums.values() if len(ways) == 1}:
        if len(several) > 1 and all(sums.get(name) == {several} for name in several):
            result |= set(sorted(several)[1:])
    return frozenset(result)


_MOVED = frozenset(("all-gather", "all-to-all", "collective-permute"))


def is_narrowed(
    module: HloModule, inside: Computation, collective: Instruction, target: str
) -> bool:
    """Whether a compiler sends bfloat16, from which the collective's operand was widened.

    Args:
        module: the program.
        inside: the computation of the collective.
        collective: the collective.
        target: "tpu": maxima and minima are narrowed; "gpu": gathers and permutes.
    """
    maker = (
        inside.instructions.get(collective.operands[0]) if len(collective.operands) == 1 else None
    )
    if maker is None or maker.opcode != "fusion":
        return False
    if target == "gpu" and (collective.opcode not in _MOVED or len(inside.users[maker.name]) > 1):
        return False
    if target == "tpu":
        body = module.computations.get(collective.called[0]) if collective.called else None
        if body is None or body.root.opcode not in ("maximum", "minimum"):
            return False
    inner = module.computations[maker.called[0]]
    row, passed = inner.root, {*_PASSED, "reduce"} if target == "tpu" else _PASSED
    while row.opcode in passed and row.operands[0] in inner.instructions:
        row = inner.instructions[row.operands[0]]
    if row.opcode != "convert" or row.arrays[0].dtype != "f32":
        return False
    return inner.instructions[row.operands[0]].arrays[0].dtype == "bf16"


def _is_reduction(row: Instruction) -> bool:
    return row.opcode in ("all-reduce", "all-reduce-start") and len(row.arrays) == 1


def _added(module: HloModule, inside: Computation, user: Instruction, name: str) -> frozenset[str]:
    """The reductions that a user adds to one before anything else."""
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
    added: frozenset[str] = frozenset()
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
        added = terms
    return added


def _terms(inside: Computation, name: str, arguments: dict[str, str]) -> frozenset[str] | None:
    """The reductions of which a value is the sum; None if it has other terms."""
    if name in arguments:
        return frozenset((arguments[name],))
    row = inside.instructions[name]
    if row.opcode in _PASSED:
        return _terms(inside, row.operands[0], arguments)
    if row.opcode != "add":
        return None
    terms = [_terms(inside, operand, arguments) for operand in row.operands]
    return None if None in terms else frozenset().union(*(term for term in terms if term))


_KINDS = {"tpu": ("all-reduce", "all-gather"), "gpu": ("all-reduce",)}
_BETWEEN = frozenset(("bitcast", "copy", "transpose"))
_GROUPS = re.compile(r", replica_groups=.*?(?=, [a-z_]+=|$)")


def fold_chained(module: HloModule, target: str) -> HloModule:
    """The program with each chain of collectives folded into one."""
    computations = {
        name: _folded(module, computation, _KINDS[target])
        for name, computation in module.computations.items()
    }
    entry = computations[module.entry.name]
    return dataclasses.replace(module, computations=computations, entry=entry)


def _folded(module: HloModule, inside: Computation, kinds: tuple[str, ...]) -> Computation:
    rows = dict(inside.instructions)
    for collective in inside.instructions.values():
        if collective.opcode not in kinds or len(collective.operands) != 1:
            continue
        between = _before(module, inside, collective)
        first = rows.get(between[-1]) if between else None
        if first is None or not _same_operation(module, first, collective):
            continue
        groups = _union(groups_of(first.text), groups_of(collective.text))
        if groups:
            for name in between:
                del rows[name]
            groups_text = ",".join(f"{{{','.join(map(str, group))}}}" for group in groups)
            attributes = (
                f"{_GROUPS.sub('', collective.attributes)}, replica_groups={{{groups_text}}}"
            )
            rows[collective.name] = dataclasses.replace(
                collective,
                operands=first.operands,
                arguments=first.arguments,
                attributes=attributes,
            )
    if len(rows) == len(inside.instructions):
        return inside
    return Computation(inside.name, rows, rows[inside.root.name])


def _before(module: HloModule, inside: Computation, row: Instruction) -> list[str]:
    """The chain of single-reader producers of a collective's operand, up to another collective."""
    before: list[str] = []
    while True:
        maker = inside.instructions.get(row.operands[0])
        if maker is None or len(inside.users[maker.name]) > 1 or maker is inside.root:
            return []
        before.append(maker.name)
        if not _only_moves(module, maker):
            return before
        row = maker


def _only_moves(module: HloModule, row: Instruction) -> bool:
    body = module.computations.get(row.called[0]) if row.opcode == "fusion" else None
    if body is None or len(row.operands) != 1:
        return row.opcode in _BETWEEN
    return all(row.opcode in {*_BETWEEN, "parameter"} for row in body.instructions.values())


def _same_operation(module: HloModule, first: Instruction, second: Instruction) -> bool:
    """Whether two collectives have the same opcode and reduction."""
    if first.opcode != second.opcode or len(first.operands) != 1:
        return False
    called = [module.computations.get(name) for name in (*first.called, *second.called)]
    return len({body.root.opcode for body in called if body is not None}) < 2


def _union(first: Groups | None, second: Groups | None) -> Groups:
    """The groups of two chained collectives together."""
    of = {device: group for group in first or () for device in group}
    joined = {
        tuple(sorted({other for device in group for other in of.get(device, (device,))}))
        for group in second or ()
    }
    return tuple(sorted(joined)) if first else ()
