"""The collectives of a compiled program, counted from its HLO text by a reader of its own.

`planning_depths` holds the planner's figures against these. Nothing of the planner is used: lines
of text, regular expressions, and the devices' places in the mesh. One run of the program counts;
of a collective its result's bytes on one device, of a reduce-scatter its operand's.

A loop runs as often as XLA noted, else (TPU) as the only integer that its condition compares with,
else as many layers as most arrays of its carry are stacked of.
"""

from __future__ import annotations

import collections
import itertools
import math
import re
from typing import NamedTuple

import numpy as np

_BITS = {"pred": 8, "token": 0}
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_SENDS = re.compile(rf" = (?P<shape>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\(")


class Sent(NamedTuple):
    """What the collectives of one kind along some axes come to.

    Attributes:
        operations: how many instructions run.
        arrays: how many arrays they send; several in one where the compiler joined them.
        bytes: of all.
    """

    operations: int
    arrays: int
    bytes: int


def counted(text: str, sizes: dict[str, int]) -> dict[str, Sent]:
    """Count a program's collectives.

    Args:
        text: of one device's program.
        sizes: of the mesh's axes, by name, in order.

    Returns:
        By kind and axes, "all-gather data".
    """
    bodies, entry = _bodies(text)
    totals: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    _walk(bodies, entry, 1, sizes, totals)
    return {name: Sent(*sums) for name, sums in sorted(totals.items())}


def _bodies(text: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry = ""
    for block in re.split(r"\n(?=(?:ENTRY )?%)", text):
        head = re.match(r"(ENTRY )?%([\w.\-]+) \(", block)
        if head:
            bodies[head[2]] = re.sub(r"/\*.*?\*/", "", block).splitlines()[1:]
            entry = head[2] if head[1] else entry
    return bodies, entry


def _walk(
    bodies: dict[str, list[str]],
    name: str,
    times: int,
    sizes: dict[str, int],
    totals: dict[str, list[int]],
    channels: set[str] | None = None,
) -> None:
    seen = set[str]() if channels is None else channels
    for line in bodies.get(name, ()):
        sends = _SENDS.search(line)
        if sends:
            channel = re.search(r"channel_id=(\d+)", line)
            if channels is not None and channel:  # one that runs in several fusions counts once
                if channel[1] in seen:
                    continue
                seen.add(channel[1])
            _add(name, line, sends, times, sizes, totals)
        elif loop := re.search(r" while\(.*?condition=%?([\w.\-]+), body=%?([\w.\-]+)", line):
            _walk(bodies, loop[2], times * _runs(bodies, line, loop[1], loop[2]), sizes, totals)
        elif inner := re.search(r" call\(.*to_apply=%?([\w.\-]+)", line):
            _walk(bodies, inner[1], times, sizes, totals)
        elif inner := re.search(r" (?:fusion|async-start)\(.*calls=%?([\w.\-]+)", line):
            _walk(bodies, inner[1], times, sizes, totals, seen)


def _add(
    body: str,
    line: str,
    sends: re.Match[str],
    times: int,
    sizes: dict[str, int],
    totals: dict[str, list[int]],
) -> None:
    shape, kind = sends["shape"], sends["kind"]
    if sends["start"] and kind != "all-reduce":
        shape = _halves(shape)[1]
    axes = _axes(line, sizes)
    if not axes:
        return
    size = sum(_bytes(*match) for match in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape))
    if kind == "reduce-scatter":
        size *= math.prod(sizes[axis] for axis in axes)
    if kind == "all-reduce" and body.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # how a TPU's program writes it
    sums = totals[f"{kind} {'+'.join(axes)}"]
    sums[0] += times
    sums[1] += times * (1 if kind == "all-to-all" else shape.count("["))
    sums[2] += times * size


def _halves(shape: str) -> list[str]:
    """The parts of the shape of what starts a collective: operands, results, and others."""
    parts, depth = [""], 0
    for letter in shape[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _bytes(dtype: str, sizes: str) -> int:
    digits = re.search(r"\d+", dtype)
    bits = _BITS.get(dtype, int(digits[0]) if digits else 8)
    return math.prod(int(size) for size in sizes.split(",") if size) * bits // 8


def _axes(line: str, sizes: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which devices that talk differ."""
    grid = list(itertools.product(*(range(size) for size in sizes.values())))
    axes = set[int]()
    for group in _groups(line, len(grid)):
        for device, other in itertools.pairwise(group):
            pairs = zip(grid[device % len(grid)], grid[other % len(grid)], strict=True)
            axes |= {at for at, (a, b) in enumerate(pairs) if a != b}
    return tuple(name for at, name in enumerate(sizes) if at in axes)


def _groups(line: str, count: int) -> list[list[int]]:
    if match := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        return [_numbers(pair) for pair in re.findall(r"\{(\d+,\d+)", "{" + match[1])]
    if match := re.search(r"groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape = _numbers(match[2])
        devices = np.arange(math.prod(shape)).reshape(shape)
        if match[3]:
            devices = devices.transpose(_numbers(match[3]))
        return devices.reshape(_numbers(match[1])).tolist()
    named = r"groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{(.*?)\}"
    if match := re.search(named, line):
        extents = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        talking = [list(extents).index(name) for name in re.findall(r"'(\w+)'", match[4])]
        base = _numbers(match[2]) if match[2] else list(extents.values())
        devices = np.arange(math.prod(base)).reshape(base)
        devices = devices.transpose(_numbers(match[3])) if match[3] else devices
        devices = devices.reshape(tuple(extents.values()))
        last = range(devices.ndim - len(talking), devices.ndim)
        wide = math.prod(devices.shape[at] for at in talking)
        return np.moveaxis(devices, talking, last).reshape(-1, wide).tolist()
    if match := re.search(r"groups=\{(\{.*?\})\}", line):
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", match[1])]
    return [list(range(count))]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _runs(bodies: dict[str, list[str]], line: str, condition: str, body: str) -> int:
    noted = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    if noted:
        return int(noted[1])
    inside = bodies[condition]
    for called in re.findall(r"calls=%?([\w.\-]+)", "\n".join(inside)):
        inside = inside + bodies.get(called, [])
    limits = re.findall(r" = [su]32\[\]\S* constant\((\d+)\)", "\n".join(inside))
    if len(set(limits)) == 1:
        return -(-int(limits[0]) // _step(bodies[condition], bodies[body]))
    carry = line.partition(" = ")[2].partition(" while(")[0]
    stacked = collections.Counter(re.findall(r"\w+\[(\d+),\d+,\d+", carry))
    return int(stacked.most_common(1)[0][0]) if stacked else 1


def _step(condition: list[str], body: list[str]) -> int:
    """By how much the number that a condition compares grows in one run; 1 if it is not plain."""
    test = re.search(r"ROOT .* compare\(%([\w.\-]+),", "\n".join(condition))
    place = test and re.search(rf"%{re.escape(test[1])} = .*index=(\d+)", "\n".join(condition))
    root = re.search(r"ROOT .* tuple\((.*?)\)", "\n".join(body))
    if not place or not root:
        return 1
    following = re.escape(root[1].split(", ")[int(place[1])].lstrip("%"))
    added = re.search(rf"%{following} = \S+ add\(%[\w.\-]+, %([\w.\-]+)\)", "\n".join(body))
    number = added and re.search(
        rf"%{re.escape(added[1])} = \S+ constant\((\d+)\)", "\n".join(body)
    )
    return int(number[1]) if number else 1
