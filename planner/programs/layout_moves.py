"""Copies of an array in another order, which products of TPUs and GPUs do without.

Compilers of TPUs and GPUs choose the order in memory of an array by what reads it, and their
products read any order. The host's compiler makes a transposed copy first.

>>> from isoshard.core.runtime.hlo_text import parsed
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
>>> axis_after(module, module.entry, module.entry.instructions["t"], 0)
1
"""

from __future__ import annotations

import math
import re

from isoshard.core.runtime.hlo_text import Computation, HloModule, Instruction

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


def is_reordered(module: HloModule, inside: Computation, one: Instruction) -> bool:
    """Whether it is a move that puts an operand's elements into another order in memory.

    Args:
        module: its program.
        inside: the computation that it stands in.
        one: the instruction.
    """
    if not is_move(module, one):
        return False
    if one.opcode == "fusion":
        body = module.computations[one.called[0]]
        return any(is_reordered(module, body, inner) for inner in body.instructions.values())
    source = inside.instructions.get(one.operands[0]) if one.operands else None
    if one.opcode == "copy" and source is not None:
        return _strides(source, True) != _strides(one, True)
    return one.opcode == "transpose"


def axis_after(module: HloModule, inside: Computation, one: Instruction, axis: int) -> int | None:
    """Where an axis of an operand is after a move.

    Args:
        module: its program.
        inside: the computation that the move stands in.
        one: the move; see `is_move`.
        axis: of its operand.

    Returns:
        The axis of the result that has it, or its outer part; None if it has one element.
    """
    if one.opcode == "copy":
        return axis
    if one.opcode == "transpose":
        found = re.search(r"dimensions=\{([\d,]*)\}", one.attributes)
        return [int(number) for number in found[1].split(",")].index(axis) if found else None
    if one.opcode != "fusion":
        source = inside.instructions[one.operands[0]]
        bitcast = one.opcode == "bitcast"
        top = _strides(source, bitcast)[axis] * source.arrays[0].sizes[axis]
        pairs = zip(_strides(one, bitcast), one.arrays[0].sizes, strict=True)
        found = [at for at, (low, size) in enumerate(pairs) if low < top <= low * size]
        return found[0] if found and source.arrays[0].sizes[axis] > 1 else None
    body = module.computations[one.called[0]]
    at, place = body.parameters[0], axis
    while at is not body.root:
        (at,) = body.users[at.name]
        place = axis_after(module, body, at, place)
        if place is None:
            return None
    return place


def _strides(one: Instruction, in_memory: bool) -> list[int]:
    """How many elements lie between two neighbours along each axis."""
    sizes = one.arrays[0].sizes
    order = list(reversed(range(len(sizes))))
    layout = re.search(r"\]\{([\d,]+)", one.shape)
    if in_memory and layout:
        order = [int(number) for number in layout[1].split(",")]
    found = [0] * len(sizes)
    for at, axis in enumerate(order):
        found[axis] = math.prod(sizes[minor] for minor in order[:at])
    return found
