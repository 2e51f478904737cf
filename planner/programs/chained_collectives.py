"""Collectives of what a collective of the same kind gives: the compilers send them as one.

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
import re

from isoshard.core.runtime.hlo_collectives import Groups, groups_of
from isoshard.core.runtime.hlo_text import Computation, HloModule, Instruction

_KINDS = {"tpu": ("all-reduce", "all-gather"), "gpu": ("all-reduce",)}
_BETWEEN = frozenset(("bitcast", "copy", "transpose"))
_SAID = re.compile(r", replica_groups=.*?(?=, [a-z_]+=|$)")


def chained_as_one(module: HloModule, target: str) -> HloModule:
    """The same program with chains of collectives as one each.

    Args:
        module: the partitioner's, on the host.
        target: "tpu" or "gpu".
    """
    computations = {
        name: _folded(module, one, _KINDS[target]) for name, one in module.computations.items()
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
            said = ",".join(f"{{{','.join(map(str, group))}}}" for group in groups)
            attributes = f"{_SAID.sub('', one.attributes)}, replica_groups={{{said}}}"
            rows[one.name] = dataclasses.replace(
                one, operands=first.operands, arguments=first.arguments, attributes=attributes
            )
    if len(rows) == len(inside.instructions):
        return inside
    return Computation(inside.name, rows, rows[inside.root.name])


def _before(module: HloModule, inside: Computation, one: Instruction) -> list[str]:
    """The names of what a collective is of, up to another of its kind, read by nobody else."""
    found: list[str] = []
    while True:
        maker = inside.instructions.get(one.operands[0])
        if maker is None or len(inside.users[maker.name]) > 1 or maker is inside.root:
            return []
        found.append(maker.name)
        if not _only_moves(module, maker):
            return found
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
