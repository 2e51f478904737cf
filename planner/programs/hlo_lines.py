"""The user's line that the metadata of an HLO instruction names."""

from __future__ import annotations

import re
import weakref

from isoshard.core.kit import HloModule, Instruction, is_users, line_in, written

_OP_NAME = re.compile(r'op_name="(?P<path>(?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(?P<number>\d+)")
_SOURCE = re.compile(r'source_file="(?P<file>[^"]*)" source_line=(?P<line>\d+)')

_LINES: weakref.WeakKeyDictionary[HloModule, dict[str, str]] = weakref.WeakKeyDictionary()
"""The line of each text of metadata in a module: many instructions have the same."""


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
    line = line_in(name["path"].replace('\\"', '"')) if name else None
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
    visited: set[str] = set()
    while number in module.frames and number not in visited:
        visited.add(number)
        file, line, function, caller = module.frames[number]
        if file and is_users(file):
            return written(file, int(line), function)
        number = caller
    return ""
