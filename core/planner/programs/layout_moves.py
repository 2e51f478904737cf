"""Copies of an array in another order, which products of TPUs and GPUs do without.

Compilers of TPUs and GPUs choose the order in memory of an array by what reads it, and their
products read any order. The host's compiler makes a transposed copy first.

>>> from isoshard.core.planner.programs.hlo_text import parsed
>>> module = parsed('''
... HloModule step
... ENTRY %main (a: bf16[8,16], b: bf16[8,4]) -> bf16[16,4] {
...   %a = bf16[8,16]{1,0} parameter(0)
...   %b = bf16[8,4]{1,0} parameter(1)
...   %t = bf16[16,8]{1,0} transpose(%a), dimensions={1,0}
...   ROOT %dot = bf16[16,4]{1,0} dot(%t, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
... }''')
>>> sorted(read_in_any_order(module, module.entry))
['t']
"""

from __future__ import annotations

from .hlo_text import Computation, HloModule, Instruction

PRODUCTS = frozenset(("dot", "convolution"))
_MOVES = frozenset(("bitcast", "copy", "reshape", "transpose"))


def read_in_any_order(module: HloModule, inside: Computation) -> frozenset[str]:
    """Names of the copies in another order that only products read.

    Args:
        module: the program.
        inside: the computation to look in.
    """
    found: set[str] = set()
    for one in reversed(tuple(inside.instructions.values())):
        users = inside.users[one.name]
        read = all(user.opcode in PRODUCTS or user.name in found for user in users)
        if users and read and one is not inside.root and is_move(module, one):
            found.add(one.name)
    return frozenset(found)


def is_move(module: HloModule, one: Instruction) -> bool:
    """Whether a result has an operand's elements, all and unchanged, in some order.

    Args:
        module: its program.
        one: the instruction.
    """
    if one.opcode in _MOVES:
        return True
    if one.opcode != "fusion" or len(one.operands) != 1:
        return False
    body = module.computations[one.called[0]]
    return all(inner.opcode in _MOVES | {"parameter"} for inner in body.instructions.values())
