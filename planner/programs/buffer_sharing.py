"""Which results of a scheduled program lie in an operand's memory, or can be made again from it."""

from __future__ import annotations

import re

from isoshard.core.runtime.hlo_text import HloModule, Instruction

_IN_PLACE = frozenset(
    ("dynamic-update-slice", "scatter", "sort", "all-reduce", "all-reduce-start", "while")
)
ELEMENTWISE = frozenset(
    "abs add and atan2 bitcast bitcast-convert cbrt ceil clamp compare convert cosine divide erf "
    "exponential exponential-minus-one floor is-finite log log-plus-one logistic maximum minimum "
    "multiply negate not or power reduce-precision remainder round-nearest-even rsqrt select sign "
    "sine sqrt subtract tanh xor".split()
)
_MOVES = frozenset(("broadcast", "iota", "reshape", "transpose", "copy"))
_WITHIN = frozenset(("parameter", "constant", "tuple", "partition-id"))


def written_over(module: HloModule, one: Instruction) -> list[tuple[int, int]]:
    """Numbers of results and of the operands that they are written over."""
    pairs = re.search(r"output_to_operand_aliasing=\{(.*?)\}, ", one.attributes + ", ")
    if pairs:
        found = re.finditer(r"\{(\d*)\}: \((\d+),", pairs[1])
        return [(int(pair[1] or 0), int(pair[2])) for pair in found]
    if one.opcode != "fusion" or not one.called:
        return []
    body = module.computations[one.called[0]]
    roots = [body.root]
    if body.root.opcode == "tuple":
        roots = [body.instructions[name] for name in body.root.operands]
    numbers = {parameter.name: at for at, parameter in enumerate(body.parameters)}
    found = []
    for at, root in enumerate(roots):
        while root.opcode == "bitcast":
            root = body.instructions[root.operands[0]]
        if root.opcode in ("dynamic-update-slice", "scatter"):
            source = body.instructions[root.operands[0]]
            while source.opcode == "bitcast":
                source = body.instructions[source.operands[0]]
            if source.name in numbers:
                found.append((at, numbers[source.name]))
    return found


def may_share(module: HloModule, one: Instruction) -> bool:
    """Whether a result may take the memory of an operand of its size."""
    if one.opcode in ELEMENTWISE or one.opcode in _IN_PLACE:
        return True
    if one.opcode != "fusion" or not one.called or "kind=kInput" in one.attributes:
        return False
    body = module.computations[one.called[0]]
    allowed = ELEMENTWISE | {"parameter", "constant", "broadcast", "tuple", "iota", "reshape"}
    return all(inner.opcode in allowed for inner in body.instructions.values())


def is_elementwise(module: HloModule, one: Instruction) -> bool:
    """Whether a result is made element by element, or is a copy in another order."""
    if one.opcode in ELEMENTWISE | _MOVES:
        return True
    if one.opcode != "fusion" or not one.called:
        return False
    body = module.computations[one.called[0]]
    allowed = ELEMENTWISE | _MOVES | _WITHIN
    return all(inner.opcode in allowed for inner in body.instructions.values())
