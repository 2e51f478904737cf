"""What XLA's compiler for GPUs makes together: results of one shape that read the same array.

Its fusions have several results (multi-output fusion of siblings): two that are made element by
element from the same large array, of which neither needs the other, are one kernel, which runs when
the operands of both are there. So both results exist at once. In an attention layer's backward
pass, these are the probabilities in bfloat16 and the gradient of the scores.

>>> from isoshard.core.runtime.hlo_text import parsed
>>> module = parsed('''
... HloModule step, is_scheduled=true
... ENTRY %main (a: f32[1024,1024], w: f32[1024,1024]) -> (f32[1024,1024], f32[1024,1024]) {
...   %a = f32[1024,1024]{1,0} parameter(0)
...   %w = f32[1024,1024]{1,0} parameter(1)
...   %one = f32[1024,1024]{1,0} tanh(%a)
...   %x = f32[1024,1024]{1,0} dot(%one, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
...   %y = f32[1024,1024]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
...   %two = f32[1024,1024]{1,0} multiply(%a, %y)
...   ROOT %all = (f32[1024,1024]{1,0}, f32[1024,1024]{1,0}) tuple(%x, %two)
... }''')
>>> list(siblings_together(module, module.entry).instructions)
['a', 'w', 'y', 'one', 'two', 'x', 'all']
"""

from __future__ import annotations

import itertools
import math

from isoshard.core.runtime.hlo_text import Computation, HloModule, Instruction

from .buffer_sharing import is_elementwise

_LARGE = 1 << 20
"""Bytes of an array that is worth reading once only."""


def siblings_together(module: HloModule, inside: Computation) -> Computation:
    """A computation with siblings next to each other, at the later one's place.

    Args:
        module: its program.
        inside: it, in the order in which it runs.
    """
    at = {name: number for number, name in enumerate(inside.instructions)}
    moved: dict[str, str] = {}
    for source in inside.instructions.values():
        if len(source.arrays) == 1 and source.arrays[0].bytes >= _LARGE:
            makers = [user for user in inside.users[source.name] if _is_like(module, user, source)]
            makers.sort(key=lambda one: at[one.name])
            for first, second in itertools.pairwise(makers):
                if first.name not in moved and not _needs(inside, second, first, at):
                    moved[first.name] = second.name
    if not moved:
        return inside
    place: dict[str, tuple[int, int]] = {}
    for one in inside.instructions.values():
        given = [(place[n][0], 2) if n in moved else place[n] for n in one.operands if n in at]
        own = (_end(moved, one.name, at), 0) if one.name in moved else (at[one.name], 1)
        place[one.name] = max([own, *given])
    rows = sorted(inside.instructions.values(), key=lambda one: (place[one.name], at[one.name]))
    return Computation(inside.name, {one.name: one for one in rows}, inside.root)


def _end(moved: dict[str, str], name: str, at: dict[str, int]) -> int:
    while name in moved:
        name = moved[name]
    return at[name]


def _is_like(module: HloModule, one: Instruction, source: Instruction) -> bool:
    """Whether a result has an element for each of an operand's, made from it."""
    if len(one.arrays) != 1 or not is_elementwise(module, one) or one.opcode == "bitcast":
        return False
    return math.prod(one.arrays[0].sizes) == math.prod(source.arrays[0].sizes)


def _needs(inside: Computation, late: Instruction, early: Instruction, at: dict[str, int]) -> bool:
    """Whether one instruction follows from another."""
    stack, seen = [late.name], {late.name}
    while stack:
        for name in inside.instructions[stack.pop()].operands:
            if name == early.name:
                return True
            if name not in seen and at.get(name, -1) > at[early.name]:
                seen.add(name)
                stack.append(name)
    return False
