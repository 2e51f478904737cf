"""The collectives of a compiled program by kind and mesh axes: how many, and their bytes."""

import collections
import itertools
import math
import re

import numpy as np

_ITEMSIZES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "bf16": 2, "f64": 8, "s64": 8, "u8": 1}
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def _bytes(shapes):
    return sum(
        _ITEMSIZES[dtype] * math.prod([int(size) for size in sizes.split(",") if size])
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shapes)
    )


def _numbers(text):
    return [int(one) for one in text.split(",")]


def _groups(line, mesh):
    """Which devices talk to each other, in any of the ways in which HLO writes it."""
    if found := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        return [_numbers(pair) for pair in re.findall(r"\{(\d+,\d+)", "{" + found[1])]
    if found := re.search(r"groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape = _numbers(found[2])
        devices = np.arange(math.prod(shape)).reshape(shape)
        if found[3]:
            devices = devices.transpose(_numbers(found[3]))
        return devices.reshape(_numbers(found[1])).tolist()
    if found := re.search(r"groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        axes = re.findall(r"'(\w+)'", found[2])
        places = [n for n, name in enumerate(sizes) if name in axes]
        devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        devices = np.moveaxis(devices, places, range(devices.ndim - len(places), devices.ndim))
        return devices.reshape(-1, math.prod(sizes[name] for name in axes)).tolist()
    if found := re.search(r"groups=\{(\{.*?\})\}", line):
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", found[1])]
    return [list(range(mesh.size))]


def _axes(groups, mesh):
    """The mesh axes along which the devices of a group differ."""
    at = list(np.ndindex(*mesh.shape.values()))
    found = {
        place
        for group in groups
        for one, other in itertools.pairwise(group)
        for place, (p, q) in enumerate(zip(at[one], at[other], strict=True))
        if p != q
    }
    return tuple(name for place, name in enumerate(mesh.shape) if place in found)


def collectives(text, mesh):
    """Of the HLO of a program: (kind, axes) -> (count, bytes) of one run; loops are counted in.

    Bytes are of a collective's result, of a reduce-scatter of its operand.
    """
    computations, entry, lines = {}, "", []
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            lines = computations[found[2]] = []
            entry = found[2] if found[1] else entry
        else:
            lines.append(line)
    totals = collections.defaultdict(lambda: (0, 0))

    def walk(name, times):
        for line in computations.get(name, ()):
            if found := re.search(rf"= (.*?) ({_KINDS})(?:-start)?\(", line):
                shapes, kind = found[1], found[2]
                axes = _axes(_groups(line, mesh), mesh)
                size = _bytes(shapes)
                if kind == "reduce-scatter":
                    size *= math.prod(mesh.shape[one] for one in axes)
                count, total = totals[kind, axes]
                totals[kind, axes] = count + times, total + size * times
            if found := re.search(r" while\(.*body=%?([\w.\-]+)", line):
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                walk(found[1], times * (int(trips[1]) if trips else 1))
            elif " call(" in line:
                walk(re.search(r"to_apply=%?([\w.\-]+)", line)[1], times)

    walk(entry, 1)
    return dict(totals)
