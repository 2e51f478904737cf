"""The order of a program's instructions, with those first that free memory."""

from __future__ import annotations

import dataclasses
import re

from .hlo_costs import FREE
from .hlo_text import Computation, HloModule, Instruction

_CONTROL = re.compile(r"control-predecessors=\{([^}]*)\}")


def eager(module: HloModule) -> HloModule:
    """The same program with instructions moved up that free at least what they make.

    The host's scheduler lets some wait, such as a gradient's product behind the loop of layers,
    while what they read stays alive; the schedulers of TPUs and GPUs do not.

    Args:
        module: scheduled.

    Returns:
        A module of the same instructions.
    """
    changed = {name: _moved(one) for name, one in module.computations.items()}
    return dataclasses.replace(module, computations=changed, entry=changed[module.entry.name])


def _moved(inside: Computation) -> Computation:
    keys: dict[str, tuple[float, int]] = {}
    last: dict[str, str] = {}
    steps = list(inside.instructions.values())
    source = _sources(steps)
    for one in steps:
        for operand in one.operands:
            for name in source.get(operand, ()):
                last[name] = one.name
    sizes = {one.name: sum(a.bytes for a in one.arrays if a.space == 0) for one in steps}
    for step, one in enumerate(steps):
        needed = [*one.operands, *_before(one)]
        ready = max((keys[name] for name in needed if name in keys), default=(-1.0, 0))
        read = {name for operand in one.operands for name in source.get(operand, ())}
        freed = sum(sizes[name] for name in read if last[name] == one.name)
        eager_now = one.opcode in FREE or sizes[one.name] <= freed
        if one.opcode == "parameter":
            keys[one.name] = (float(step), step)
        elif eager_now and needed and freed:
            keys[one.name] = (ready[0], step)
        else:
            keys[one.name] = (max(float(step), ready[0]), step)
    names = sorted(keys, key=lambda name: keys[name])
    return dataclasses.replace(
        inside, instructions={name: inside.instructions[name] for name in names}
    )


def _sources(steps: list[Instruction]) -> dict[str, frozenset[str]]:
    """The instructions whose memory each name stands for."""
    found: dict[str, frozenset[str]] = {}
    for one in steps:
        if one.opcode in ("tuple", "get-tuple-element", "bitcast"):
            parts = (found.get(name, frozenset()) for name in one.operands)
            found[one.name] = frozenset().union(*parts)
        elif one.opcode == "parameter":
            found[one.name] = frozenset()
        else:
            found[one.name] = frozenset((one.name,))
    return found


def _before(one: Instruction) -> list[str]:
    found = _CONTROL.search(one.attributes)
    return [name.strip(" %") for name in found[1].split(",")] if found else []
