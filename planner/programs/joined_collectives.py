"""Small collectives that compilers of TPUs and GPUs send as one.

XLA's combiner passes take those of one computation that do the same among the same devices, in
order, until the next one needs the result of one of them or they become too large together. What is
sent stays the same; there are fewer operations. libtpu joins all-reduces, by 120 MiB (its flag
`xla_jf_crs_combiner_threshold_in_bytes`); the compiler for GPUs also gathers, reduce-scatters and
permutes, by 30 MiB of results.

The compiler for GPUs has made kernels of several results before, so one collective may wait for
what only another result needs; see `kernel_waits`.

Source: collective_combiner_utils.h of XLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from isoshard.core.runtime.hlo_collectives import groups_of
from isoshard.core.runtime.hlo_text import Computation, HloModule
from isoshard.planner.costs.device_program import DeviceOp

from .kernel_waits import waits

_ONES_OF_GPUS = ("all-gather", "all-reduce", "collective-permute", "reduce-scatter")
_MOST_BYTES = {
    "tpu": {"all-reduce": 120 * 2**20},
    "gpu": dict.fromkeys(_ONES_OF_GPUS, 30 * 2**20 + 7),
}
_MOST_ARRAYS = 256


class SentBy(NamedTuple):
    """What an instruction does.

    Attributes:
        name: of the instruction; "" of one in another computation.
        op: what it does.
    """

    name: str
    op: DeviceOp


def joined(
    module: HloModule, inside: Computation, done: Sequence[SentBy], target: str
) -> list[DeviceOp]:
    """What a computation does, with small collectives as one.

    Args:
        module: the program.
        inside: the computation.
        done: what it does, in order.
        target: "tpu" or "gpu".

    Returns:
        The operations; one that stands for several is where the last of them was, and has the line
        of the largest.
    """
    most = _MOST_BYTES.get(target, {})
    numbers: dict[Hashable, int] = {}
    kinds = {
        place: numbers.setdefault(_kind(module, inside, one), place)
        for place, one in enumerate(done)
        if one.name and one.op.name in most and _size(inside, one) <= most[one.op.name]
    }
    places = {done[place].name: place for place in kinds}
    if target == "gpu":
        before = waits(module, inside, places)
        kinds = {places[name]: kinds[places[name]] for name in before}
    else:
        before = _before(inside, {*places})
    replaced: dict[int, DeviceOp | None] = {}
    while kinds:
        first = next(iter(kinds))
        several, total = list[int](), 0
        for place in [one for one, kind in kinds.items() if kind == kinds[first]]:
            total += _size(inside, done[place])
            needs = before[done[place].name]
            if total > most[done[first].op.name] or any(done[n].name in needs for n in several):
                break
            several.append(place)
            if len(several) == _MOST_ARRAYS:
                break
        for place in several:
            del kinds[place]
            replaced[place] = None
        replaced[max(several)] = _as_one([done[place].op for place in several])
    ops = [replaced.get(place, one.op) for place, one in enumerate(done)]
    return [op for op in ops if op is not None]


def _kind(module: HloModule, inside: Computation, one: SentBy) -> Hashable:
    """Equal for collectives that may be one."""
    made = inside.instructions[one.name]
    body = module.computations.get(made.called[0]) if made.called else None
    dtype = "" if one.op.name == "all-gather" else one.op.dtype
    return one.op.name, groups_of(made.text), dtype, body.root.opcode if body else ""


def _size(inside: Computation, one: SentBy) -> int:
    """Bytes of its result."""
    if one.op.name != "reduce-scatter":
        return one.op.sent
    groups = groups_of(inside.instructions[one.name].text)
    return one.op.sent // (len(groups[0]) if groups else 1)


def _before(inside: Computation, names: set[str]) -> dict[str, frozenset[str]]:
    """Of each instruction, which of some others it needs."""
    found: dict[str, frozenset[str]] = {}
    for one in inside.instructions.values():
        operands = [name for name in one.operands if name in found]
        needed = (found[name] | ({name} & names) for name in operands)
        found[one.name] = frozenset[str]().union(*needed)
    return found


def _as_one(ops: Sequence[DeviceOp]) -> DeviceOp:
    largest = max(ops, key=lambda op: op.sent)
    return dataclasses.replace(
        largest,
        bytes=sum(op.bytes for op in ops),
        sent=sum(op.sent for op in ops),
        live=max(op.live for op in ops),
        waits=any(op.waits for op in ops),
    )
