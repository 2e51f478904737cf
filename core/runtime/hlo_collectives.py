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

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from .hlo_slice_transfers import transfer

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


_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?P<rest>.*)$")
_OPCODE = re.compile(rf"\s*(?P<kind>{'|'.join(sorted(KINDS, key=len)[::-1])})(?P<start>-start)?\(")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%?(?P<name>[\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{(?P<names>[^}]*)\}")
_TWO_WAYS = re.compile(r"\b(?:true|false)_computation=%?(?P<name>[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(?P<count>\d+)"\}')


def collectives(program: str) -> tuple[Collective, ...]:
    """List the collectives of an HLO module's text, each with how often it runs.

    Args:
        program: the optimised HLO of one device.
    """
    computations, entry = _computations(program)
    return tuple(_in(computations, entry, 1)) if entry else ()


def operation(instruction: str) -> tuple[str, int] | None:
    """What one instruction sends: HLO's name of the collective, and the bytes of its result.

    Args:
        instruction: its text after the `=`.

    Returns:
        None for any other instruction, the `-done` of an asynchronous pair among them.

    >>> operation("(f32[4]{0}, f32[8]{0}) all-gather-start(%x), dimensions={0}")
    ('all-gather', 32)
    """
    shape, rest = split_shape(instruction)
    opcode = _OPCODE.match(rest)
    if opcode is None:
        return _between_slices(instruction, shape)
    if opcode["start"] and opcode["kind"] != "all-reduce":
        shape = tuple_parts(shape)[1]  # (operands, results, ..); all-reduce-start has results only
    return opcode["kind"], _bytes(shape)


def _between_slices(instruction: str, shape: str) -> tuple[str, int] | None:
    """The same of what a TPU sends to other slices by its host."""
    found = transfer(instruction)
    if found is None:
        return None
    size, among = _bytes(tuple_parts(shape)[0]), len(found.slices[0])
    if found.kind == "all-gather":
        size *= among
    return found.kind, size // among if found.kind == "reduce-scatter" else size


def axes_of(found: Collective, mesh: jax.sharding.Mesh) -> tuple[str, ...] | None:
    """The axes of a mesh along which a collective talks; None if it goes across them.

    Args:
        found: the collective.
        mesh: over the devices of the program, in their order.

    >>> from isoshard import make_mesh
    >>> mesh = make_mesh((2, 4), ("dp", "tp"))
    >>> axes_of(Collective("all_reduce", 8, ((0, 4), (1, 5), (2, 6), (3, 7)), 1), mesh)
    ('dp',)
    """
    shape = tuple(mesh.axis_sizes)
    groups = ((tuple(range(mesh.size)),) if found.groups == () else found.groups) or ()
    varying: set[int] = set()
    for group in groups:
        if max(group) >= mesh.size:
            return None
        places = np.unravel_index(np.array(group), shape)
        varying |= {axis for axis, at in enumerate(places) if len(set(at.tolist())) > 1}
    wide = math.prod(shape[axis] for axis in varying)
    permutes = found.kind == "collective_permute"
    if not groups or (not permutes and any(len(group) != wide for group in groups)):
        return None
    return tuple(mesh.axis_names[axis] for axis in sorted(varying))


def _computations(program: str) -> tuple[dict[str, list[str]], str]:
    """The instructions of each computation, and the name of the first to run."""
    found: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in program.splitlines():
        if not line[:1].isspace():
            header = _COMPUTATION.match(line)
            if header:
                lines = found[header["name"]] = []
                entry = header["name"] if header["entry"] else entry
        elif instruction := _INSTRUCTION.match(line):
            lines.append(instruction["rest"])
    return found, entry


def _in(computations: dict[str, list[str]], name: str, times: int) -> Iterator[Collective]:
    """What one computation executes, and those that it calls."""
    for instruction in computations.get(name, ()):
        if found := operation(instruction):
            kind, size = found
            yield Collective(KINDS[kind], size, groups_of(instruction), times)
            continue
        trips = _TRIPS.search(instruction)
        for called in _CALLED.finditer(instruction):
            yield from _in(
                computations, called["name"], times * int(trips["count"] if trips else 1)
            )
        several = _BRANCHES.search(instruction)
        names = several["names"].split(",") if several else _TWO_WAYS.findall(instruction)
        branches = [list(_in(computations, one.strip(" %"), times)) for one in names]
        yield from max(branches, key=_runs, default=[])


def _runs(branch: list[Collective]) -> int:
    return sum(found.times for found in branch)


def split_shape(text: str) -> tuple[str, str]:
    """Split `shape opcode(..)..` after the shape.

    Args:
        text: of an instruction, after its `=`.
    """
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for end, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: end + 1], text[end + 1 :]
    return text, ""


def tuple_parts(shape: str) -> list[str]:
    """The elements of a tuple shape.

    Args:
        shape: its text.
    """
    parts, depth, start = [], 0, 1
    for at, letter in enumerate(shape):
        depth += (letter in "({[") - (letter in ")}]")
        if (letter == "," and depth == 1) or depth == 0:
            parts.append(shape[start:at])
            start = at + 1
    return parts


def _bytes(shape: str) -> int:
    return sum(array_bytes(array["dtype"], array["dims"]) for array in _ARRAY.finditer(shape))


def array_bytes(dtype: str, dims: str) -> int:
    """Bytes of one array; types below one byte are packed.

    Args:
        dtype: as HLO names it, such as `bf16`.
        dims: its axes' sizes, such as `2,<=3`.
    """
    if dtype in ("token", "opaque"):
        return 0
    elements = math.prod(int(dim.removeprefix("<=")) for dim in filter(None, dims.split(",")))
    digits = re.search(r"\d+", dtype)
    bits = 8 if dtype == "pred" or digits is None else int(digits[0])
    return -(-elements * bits // 8)


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


@functools.lru_cache(maxsize=1024)
def groups_of(rest: str) -> Groups | None:
    """Who talks to whom, from one of the three ways in which XLA writes it; None if it does not.

    Args:
        rest: text of the instruction.
    """
    if listed := _LISTED.search(rest):
        groups = re.findall(r"\{([\d,]+)\}", "{" + listed["groups"] + "}")
        return tuple(tuple(_numbers(group)) for group in groups)
    if tiled := _TILED.search(rest):
        return _as_groups(_devices(tiled["base"], tiled["turn"]).reshape(_numbers(tiled["shape"])))
    if meshed := _MESHED.search(rest):
        extents = {axis["name"]: int(axis["extent"]) for axis in _AXIS.finditer(meshed["mesh"])}
        whole = ",".join(map(str, extents.values()))
        devices = _devices(meshed["base"] or whole, meshed["turn"])
        return _along(devices.reshape(tuple(extents.values())), list(extents), meshed["axes"])
    return None


def _along(grid: np.ndarray, names: list[str], axes: str) -> Groups:
    """The groups of a mesh's devices along some of its axes, or parts of axes."""
    shape: list[int] = []
    talking: list[int] = []
    wanted = {axis["name"]: axis for axis in _AXIS.finditer(axes)}
    for name, extent in zip(names, grid.shape, strict=True):
        axis = wanted.get(name)
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
    shape = _numbers(base)
    grid = np.arange(math.prod(shape)).reshape(shape)
    return grid.transpose(_numbers(turn)) if turn else grid


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _as_groups(grid: np.ndarray) -> Groups:
    return tuple(tuple(group) for group in grid.tolist())
