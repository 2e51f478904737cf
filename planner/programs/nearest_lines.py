"""The user's line of an instruction, also of one that XLA made itself, by its neighbours."""

from __future__ import annotations

import re
import weakref

from isoshard.core.runtime.hlo_text import Computation, HloModule, Instruction
from isoshard.core.traced.source_lines import is_users, said_by, written

_OP_NAME = re.compile(r'op_name="(?P<path>(?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(?P<number>\d+)")
_SOURCE = re.compile(r'source_file="(?P<file>[^"]*)" source_line=(?P<line>\d+)')

_LINES: weakref.WeakKeyDictionary[HloModule, dict[str, str]] = weakref.WeakKeyDictionary()
"""The line of each text of metadata in a module: many instructions have the same."""

_STEPS = 6
"""How far to look."""


def line_of(module: HloModule, instruction: Instruction) -> str:
    """The user's line that an instruction's metadata names; "" if it names none."""
    metadata = instruction.attributes.partition("metadata={")[2]
    if not metadata:
        return ""
    lines = _LINES.setdefault(module, {})
    if metadata not in lines:
        lines[metadata] = _line_in(module, metadata)
    return lines[metadata]


def _line_in(module: HloModule, metadata: str) -> str:
    name = _OP_NAME.search(metadata)
    line = said_by(name["path"].replace('\\"', '"')) if name else None
    if line is not None:
        return line
    frame = _FRAME.search(metadata)
    if frame:
        return _line_of_frame(module, frame["number"])
    file = _SOURCE.search(metadata)
    if file and is_users(file["file"]):
        return written(file["file"], int(file["line"]), "").removesuffix(" ()")
    return ""


def _line_of_frame(module: HloModule, number: str) -> str:
    seen: set[str] = set()
    while number in module.frames and number not in seen:
        seen.add(number)
        file, line, function, caller = module.frames[number]
        if file and is_users(file):
            return written(file, int(line), function)
        number = caller
    return ""


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
    found = next(filter(None, (line_of(module, each) for each in (one, *inner))), "")
    return found or _along(module, inside, one, up=True) or _along(module, inside, one, up=False)


def line_at(module: HloModule, one: Instruction) -> str:
    """As `nearest_line`, of an instruction wherever it stands.

    Args:
        module: its program.
        one: the instruction.
    """
    said = line_of(module, one)
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
        found = next(filter(None, (line_of(module, other) for other in near)), "")
        if found:
            return found
    return ""


def _next_to(inside: Computation, one: Instruction, up: bool) -> list[Instruction]:
    if not up:
        return list(inside.users.get(one.name, ()))
    known = inside.instructions
    return [known[name] for name in one.operands if name in known]
