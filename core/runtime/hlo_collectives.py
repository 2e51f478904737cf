"""The collectives of a compiled program: how often they run, how much they move, and among whom.

>>> program = '''
... HloModule step
... %body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
...   %all-reduce = f32[8]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
... }
... ENTRY %main (p: f32[8]) -> f32[8] {
...   %w = (s32[], f32[8]) while(%p), body=%body, backend_config={"known_trip_count":{"n":"5"}}
...   ROOT %ag = f32[16]{0} all-gather(%w), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}
... }'''
>>> for found in collectives(program):
...     print(found.times, found.kind, found.bytes, found.groups)
5 all_reduce 32 ((0, 1, 2, 3), (4, 5, 6, 7))
1 all_gather 64 ((0, 4), (1, 5), (2, 6), (3, 7))

`bytes` is the size of the result on one device; of several arrays sent as one, the sum. A loop
whose length XLA does not know counts once; of the branches of a condition, the one with the most.

Source: the text form of XLA's HLO, https://openxla.org/xla/operation_semantics.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from isoshard.core.runtime.caches import cached

from .hlo_slice_transfers import transfer
from .hlo_text import (
    Computation,
    HloModule,
    Instruction,
    instructions,
    parsed,
    shape_bytes,
    tuple_elements,
)

KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "collective-broadcast": "broadcast",
    "collective-permute": "collective_permute",
    "ragged-all-to-all": "all_to_all",
    "reduce-scatter": "reduce_scatter",
}
"""What HLO calls them, and what `CommDebugMode` does."""

Groups = tuple[tuple[int, ...], ...]


class Collective(NamedTuple):
    """One collective operation of a program.

    Attributes:
        kind: one of `KINDS`' values.
        bytes: size of its result on one device.
        groups: the devices that talk, as places in the mesh; None if the text does not say, or
            slices talk by their hosts.
        times: how often one run of the program executes it.
    """

    kind: str
    bytes: int
    groups: Groups | None
    times: int


_TRIPS = re.compile(r'"known_trip_count":\{"n":"(?P<count>\d+)"\}')


def collectives(program: str) -> tuple[Collective, ...]:
    """The collectives of an HLO module's text, each with how often it runs.

    Args:
        program: the optimized HLO of one device; text without an entry computation has none.
    """
    if "ENTRY " not in program:
        return ()
    module = parsed(program)
    return tuple(_executed(module, module.entry, 1))


def operation(instruction: Instruction) -> tuple[str, int] | None:
    """HLO's name of the collective that an instruction is, and the bytes of its result.

    Returns:
        None for any other instruction, the `-done` of an asynchronous pair among them.

    >>> from isoshard.core.runtime.hlo_text import instructions
    >>> lines = instructions("%a = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), dimensions={0}")
    >>> operation(lines["a"])
    ('all-gather', 32)
    """
    kind, shape = instruction.opcode.removesuffix("-start"), instruction.shape
    if kind not in KINDS:
        return _between_slices(instruction)
    if kind not in (instruction.opcode, "all-reduce"):
        shape = tuple_elements(shape)[
            1
        ]  # (operands, results, ..); all-reduce-start has results only
    return kind, shape_bytes(shape)


def counted(program: str) -> dict[str, tuple[int, int]]:
    """Of each kind of collective its instructions in a program's text, and their bytes.

    A loop counts once, and so does each branch of a condition.

    >>> counted("%a = f32[2] all-reduce(%x)\\n%b = f32[3] all-reduce(%a)")
    {'all-reduce': (2, 20)}
    """
    sent = [*filter(None, map(operation, instructions(program).values()))]
    sizes = {kind: [size for name, size in sent if name == kind] for kind, _ in sorted(sent)}
    return {kind: (len(each), sum(each)) for kind, each in sizes.items()}


def _between_slices(instruction: Instruction) -> tuple[str, int] | None:
    """The same of what a TPU sends to other slices by its host."""
    if instruction.opcode != "send" or (sent := transfer(instruction.text)) is None:
        return None
    size, devices = shape_bytes(tuple_elements(instruction.shape)[0]), len(sent.slices[0])
    if sent.kind == "all-gather":
        size *= devices
    return sent.kind, size // devices if sent.kind == "reduce-scatter" else size


def axes_of(collective: Collective, mesh: jax.sharding.Mesh) -> tuple[str, ...] | None:
    """The axes of a mesh along which a collective talks; None if it goes across them.

    >>> from isoshard import make_mesh
    >>> mesh = make_mesh((2, 4), ("dp", "tp"))
    >>> axes_of(Collective("all_reduce", 8, ((0, 4), (1, 5), (2, 6), (3, 7)), 1), mesh)
    ('dp',)
    """
    shape = tuple(mesh.axis_sizes)
    groups = ((tuple(range(mesh.size)),) if collective.groups == () else collective.groups) or ()
    varying: set[int] = set()
    for group in groups:
        if max(group) >= mesh.size:
            return None
        coordinates = np.unravel_index(np.array(group), shape)
        varying |= {axis for axis, at in enumerate(coordinates) if len(set(at.tolist())) > 1}
    wide = math.prod(shape[axis] for axis in varying)
    permutes = collective.kind == "collective_permute"
    if not groups or (not permutes and any(len(group) != wide for group in groups)):
        return None
    return tuple(mesh.axis_names[axis] for axis in sorted(varying))


def _executed(module: HloModule, inside: Computation, times: int) -> Iterator[Collective]:
    """What a computation executes, and those that it calls."""
    for instruction in inside.instructions.values():
        if sent := operation(instruction):
            kind, size = sent
            yield Collective(KINDS[kind], size, groups_of(instruction.text), times)
        elif instruction.called and instruction.opcode != "custom-call":
            trips = _TRIPS.search(instruction.attributes)
            runs = times * int(trips["count"] if trips else 1)
            bodies = [module.computations.get(name) for name in instruction.called]
            each = [tuple(_executed(module, body, runs)) for body in bodies if body]
            if instruction.opcode == "conditional":
                yield from max(each, key=_runs, default=())
            else:
                yield from itertools.chain(*each)


def _runs(branch: tuple[Collective, ...]) -> int:
    return sum(collective.times for collective in branch)


_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(?P<groups>(?:\{[\d,]*\},?)*)\}")
_TILED = re.compile(
    r"replica_groups=\[(?P<shape>[\d,]+)\]<=\[(?P<base>[\d,]+)\](?:T\((?P<turn>[\d,]+)\))?"
)
_MESHED = re.compile(
    r"replica_groups=mesh\[(?P<mesh>[^\]]*)\]"
    r"(?:, device_ids=\(\[(?P<base>[\d,]+)\](?:T\((?P<turn>[\d,]+)\))?\))?"
    r"\s*\{(?P<axes>[^}]*)\}"
)
_AXIS = re.compile(r"'(?P<name>[^']+)'(?::\((?P<before>\d+)\)(?P<size>\d+))?(?:=(?P<extent>\d+))?")


@cached(1024)
def groups_of(rest: str) -> Groups | None:
    """Who talks to whom, from one of the three ways in which XLA writes it; None if it does not."""
    if listed := _LISTED.search(rest):
        groups = re.findall(r"\{([\d,]+)\}", "{" + listed["groups"] + "}")
        return tuple(tuple(_integers(group)) for group in groups)
    if tiled := _TILED.search(rest):
        return _as_groups(_devices(tiled["base"], tiled["turn"]).reshape(_integers(tiled["shape"])))
    if meshed := _MESHED.search(rest):
        extents = {axis["name"]: int(axis["extent"]) for axis in _AXIS.finditer(meshed["mesh"])}
        every_extent = ",".join(map(str, extents.values()))
        devices = _devices(meshed["base"] or every_extent, meshed["turn"])
        return _groups_over(devices.reshape(tuple(extents.values())), list(extents), meshed["axes"])
    return None


def _groups_over(grid: np.ndarray, names: list[str], axes: str) -> Groups:
    """The groups of a mesh's devices along some of its axes, or parts of axes."""
    shape: list[int] = []
    talking: list[int] = []
    named = {axis["name"]: axis for axis in _AXIS.finditer(axes)}
    for name, extent in zip(names, grid.shape, strict=True):
        axis = named.get(name)
        before, size = (1, extent) if axis is None or not axis["size"] else _sub_axis(axis)
        if axis is not None:
            talking.append(len(shape) + 1)
        shape += [before, size, extent // (before * size)]
    split = np.moveaxis(grid.reshape(shape), talking, range(-len(talking), 0))
    return _as_groups(split.reshape(-1, math.prod(shape[at] for at in talking)))


def _sub_axis(axis: re.Match[str]) -> tuple[int, int]:
    return int(axis["before"]), int(axis["size"])


def _devices(base: str, turn: str | None) -> np.ndarray:
    """Device numbers counted up in a grid, whose axes may be exchanged."""
    shape = _integers(base)
    grid = np.arange(math.prod(shape)).reshape(shape)
    return grid.transpose(_integers(turn)) if turn else grid


def _integers(text: str) -> list[int]:
    return [int(digits) for digits in text.split(",")]


def _as_groups(grid: np.ndarray) -> Groups:
    return tuple(tuple(group) for group in grid.tolist())
