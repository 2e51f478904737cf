"""Stacked weights that a GPU's program copies because its loop gathers them along an inner axis.

NCCL joins what devices send one behind the other, so XLA's compiler for GPUs lays an array out with
the gathered axis outermost. A loop over layers slices its weights out of a stack; where that axis
is an inner one of the stack (weights of `[out, in]`, split along `in`), the whole stack is copied
into the other order before the loop, and the copy stays until the last loop that reads it.
"""

from __future__ import annotations

import dataclasses
import re

from isoshard.core.runtime.hlo_text import Computation, HloModule, Instruction

_LARGE = 1 << 20


def with_gathered_copies(module: HloModule) -> HloModule:
    """The same program with those copies.

    Args:
        module: it, in the order in which it runs.
    """
    entry = module.entry
    copied: dict[str, str] = {}
    rows = dict[str, Instruction]()
    for one in entry.instructions.values():
        if one.opcode == "while":
            start = entry.instructions[one.operands[0]]
            body = module.computations[one.called[0]]
            numbers = _turned(module, body) if start.opcode == "tuple" else set[int]()
            for name in [start.operands[at] for at in sorted(numbers)]:
                source = entry.instructions[name]
                if name not in copied and source.arrays[0].bytes >= _LARGE:
                    copied[name] = f"{name}.gathered"
                    rows[copied[name]] = dataclasses.replace(
                        source,
                        name=copied[name],
                        opcode="custom-call",
                        operands=(name,),
                        attributes="",
                    )
            if copied and start.opcode == "tuple":
                operands = tuple(copied.get(name, name) for name in start.operands)
                rows.pop(start.name)
                rows[start.name] = dataclasses.replace(start, operands=operands)
        rows[one.name] = one
    if not copied:
        return module
    changed = Computation(entry.name, rows, rows[entry.root.name])
    computations = dict(module.computations) | {entry.name: changed}
    return dataclasses.replace(module, computations=computations, entry=changed)


def _turned(module: HloModule, body: Computation) -> set[int]:
    """Numbers of the carry's stacks that a body gathers along an inner axis of a slice."""
    found = set[int]()
    for one in body.instructions.values():
        if not one.opcode.startswith("all-gather") or one.opcode.endswith("-done"):
            continue
        axis = re.search(r"\bdimensions=\{(\d+)\}", one.attributes)
        maker = body.instructions.get(one.operands[0])
        if axis is None or maker is None or maker.opcode != "fusion":
            continue
        inside = module.computations[maker.called[0]]
        slices = [row for row in inside.instructions.values() if row.opcode == "dynamic-slice"]
        turns = [row for row in inside.instructions.values() if row.opcode == "transpose"]
        if len(slices) != 1 or len(turns) > 1:
            continue
        place = int(axis[1])
        if turns:
            place = _numbers(turns[0].attributes)[place]
        parameters = {row.name: number for number, row in enumerate(inside.parameters)}
        stack = parameters.get(slices[0].operands[0])
        source = None if stack is None else body.instructions[maker.operands[stack]]
        if place and source is not None and source.opcode == "get-tuple-element":
            found.add(int(source.attributes.partition("index=")[2].partition(",")[0]))
    return found


def _numbers(attributes: str) -> list[int]:
    found = re.search(r"dimensions=\{([\d,]*)\}", attributes)
    return [int(one) for one in found[1].split(",")] if found else []
