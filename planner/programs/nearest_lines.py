"""The user's line of an instruction that XLA made itself, by what stands next to it."""

from __future__ import annotations

from .hlo_text import Computation, HloModule, Instruction

_STEPS = 6
"""How far to look."""


def nearest_line(module: HloModule, inside: Computation, one: Instruction) -> str:
    """The line of an instruction, of what it does inside, or of the nearest that has one.

    Args:
        module: its program.
        inside: the computation that it stands in.
        one: the instruction.

    Returns:
        The line of what it is made from, rather than of what is made from it; "" if none is near.
    """
    bodies = [module.computations[name] for name in one.called if name in module.computations]
    inner = [one for body in bodies for one in (body.root, *body.instructions.values())]
    found = next(filter(None, map(module.line_of, [one, *inner])), "")
    return found or _along(module, inside, one, up=True) or _along(module, inside, one, up=False)


def line_at(module: HloModule, one: Instruction) -> str:
    """As `nearest_line`, of an instruction wherever it stands.

    Args:
        module: its program.
        one: the instruction.
    """
    said = module.line_of(one)
    if said:
        return said
    places = (body for body in module.computations.values() if one.name in body.instructions)
    inside = next(places, None)
    return nearest_line(module, inside, one) if inside else ""


def _along(module: HloModule, inside: Computation, one: Instruction, *, up: bool) -> str:
    near, seen = [one], {one.name}
    for _ in range(_STEPS):
        around = [other for at in near for other in _next_to(inside, at, up)]
        near = [other for other in around if other.name not in seen]
        seen |= {other.name for other in near}
        found = next(filter(None, map(module.line_of, near)), "")
        if found:
            return found
    return ""


def _next_to(inside: Computation, one: Instruction, up: bool) -> list[Instruction]:
    if not up:
        return list(inside.users.get(one.name, ()))
    known = inside.instructions
    return [known[name] for name in one.operands if name in known]
