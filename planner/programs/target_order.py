"""The order in which compilers of TPUs and GPUs run a program, where the host's has another.

They schedule from the end of a program to its start, to hide communication behind computing: what
nobody waits for comes late. The gradient of a model's head, which only its optimizer wants, is
computed behind the loop of the layers' backward pass, and what it is computed from is kept until
then. The host's compiler computes it at once. And what is small and the last to read what is large
(the gradient of a norm's weight) they compute at once, where the host's compiler may leave it to
the end.

>>> from isoshard.core.runtime.hlo_text import parsed
>>> module = parsed('''
... HloModule step, is_scheduled=true
... %body (c: f32[8]) -> f32[8] {
...   ROOT %c = f32[8]{0} parameter(0)
... }
... ENTRY %main (a: f32[8], b: f32[8]) -> (f32[8], f32[]) {
...   %a = f32[8]{0} parameter(0)
...   %b = f32[8]{0} parameter(1)
...   %dot = f32[] dot(%a, %b), lhs_contracting_dims={0}, rhs_contracting_dims={0}
...   %loop = f32[8]{0} while(%a), condition=%c, body=%body
...   ROOT %all = (f32[8]{0}, f32[]) tuple(%loop, %dot)
... }''')
>>> [name for name in in_target_order(module).entry.instructions]
['a', 'b', 'loop', 'dot', 'all']
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from isoshard.core.runtime.hlo_collectives import operation
from isoshard.core.runtime.hlo_text import ArrayShape, Computation, HloModule, Instruction

from .hlo_costs import FREE, RUNS_OTHERS
from .layout_moves import PRODUCTS

_SMALL = 8
"""A result that many times smaller than what it reads for the last time is computed at once."""


def in_target_order(module: HloModule, *, saving: bool = False) -> HloModule:
    """The same program in the order of a TPU's or GPU's compiler.

    Args:
        module: whose computations stand in the order in which the host runs them.
        saving: to save memory rather than time: products, too, are computed as soon as they end
            the life of something much larger (gradients of weights, activations).
    """
    computations = {name: _early(one, saving) for name, one in module.computations.items()}
    entry = _late(computations[module.entry.name])
    computations[entry.name] = entry
    return dataclasses.replace(module, computations=computations, entry=entry)


def _late(inside: Computation) -> Computation:
    """Products and collectives, and what follows, behind the loops that do not need them."""
    ordered = list(inside.instructions.values())
    part, number = dict[str, int](), 0
    for one in ordered:
        part[one.name] = number
        number += one.opcode == "while"
    allowed = dict(part)
    for one in reversed(ordered):
        if one.opcode not in ("while", "parameter") and one is not inside.root:
            users = inside.users[one.name]
            allowed[one.name] = min((allowed[user.name] for user in users), default=part[one.name])
    moved = set[str]()
    for one in ordered:
        if allowed[one.name] > part[one.name] and (_is_hidden(one) or moved & set(one.operands)):
            moved.add(one.name)
    placed = {name: allowed[name] if name in moved else part[name] for name in part}
    return _sorted(inside, {one.name: (placed[one.name], one.opcode == "while") for one in ordered})


def _early(inside: Computation, saving: bool) -> Computation:
    """What is small, and reads what is large for the last time, as soon as that is there."""
    at = {name: number for number, name in enumerate(inside.instructions)}
    place = {name: (number, 0) for name, number in at.items()}
    for one in inside.instructions.values():
        given = [place[name] for name in one.operands if name in at]
        place[one.name] = max([(at[one.name], 0), *given]) if given else (-1, 0)
        products = frozenset[str]() if saving else PRODUCTS
        if one.opcode in FREE | RUNS_OTHERS | products or operation(one) or not given:
            continue
        own = _only_for(inside, one) if saving else [one]
        mine = {row.name for row in own}
        read = [name for row in own for name in row.operands if name in at and name not in mine]
        large = sum(
            array.bytes
            for name in dict.fromkeys(read)
            if max(at[user.name] for user in inside.users[name]) <= at[one.name]
            and inside.users[name][-1].name in mine
            for array in _made(inside.instructions[name])
        )
        if _SMALL * sum(array.bytes for array in one.arrays) < large:
            ready = max((place[name] for name in read), default=(-1, 0))
            for number, row in enumerate(reversed(own), 1):
                place[row.name] = (ready[0], ready[1] + number)
    return _sorted(inside, place)


def _only_for(inside: Computation, one: Instruction) -> list[Instruction]:
    """An instruction, and what is made for it alone, the last first."""
    own = [one]
    for row in own:
        for name in row.operands:
            source = inside.instructions.get(name)
            if source is not None and source.opcode in ("bitcast", "copy", "fusion", "transpose"):
                if len(inside.users[name]) == 1:
                    own.append(source)
    return own


def _made(one: Instruction) -> tuple[ArrayShape, ...]:
    """The arrays of a result, unless it is given."""
    return () if one.opcode in ("parameter", "get-tuple-element") else one.arrays


def _sorted(inside: Computation, key: Mapping[str, tuple[int, ...]]) -> Computation:
    rows = sorted(inside.instructions.values(), key=lambda one: key[one.name])
    return Computation(inside.name, {one.name: one for one in rows}, inside.root)


def _is_hidden(one: Instruction) -> bool:
    return one.opcode in PRODUCTS or operation(one) is not None
