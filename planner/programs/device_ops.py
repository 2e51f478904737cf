"""The operations of a compiled program, in the order in which one device runs them.

An instruction that XLA inserted gets the user's line of the nearest one that has a line.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import numpy as np
from jax.sharding import Mesh

from isoshard.core.kit import (
    KINDS,
    Collective,
    Computation,
    Groups,
    HloModule,
    Instruction,
    axes_of,
    groups_of,
    is_users,
    line_in,
    operation,
    written,
)
from isoshard.planner.costs.device_program import DeviceOp
from isoshard.planner.scheduling.kernels import awaited

from .collective_combining import InstructionOp, joined
from .collective_rewrites import is_narrowed, is_sliced, joined_reductions
from .hlo_costs import FREE, costs_of, operand_arrays, trips
from .hlo_kernels import dataflow
from .hlo_layouts import is_reordered
from .sliced_programs import SlicedProgram

_OP_NAME = re.compile(r'op_name="(?P<path>(?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(?P<number>\d+)")
_SOURCE = re.compile(r'source_file="(?P<file>[^"]*)" source_line=(?P<line>\d+)')

_LINES: weakref.WeakKeyDictionary[HloModule, dict[str, str]] = weakref.WeakKeyDictionary()
"""The line of each text of metadata in a module: many instructions have the same."""

_STEPS = 6
"""How many instructions away a line is searched for."""


def line_of(module: HloModule, instruction: Instruction) -> str:
    """The user's line of an instruction; "" without one."""
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


def _line_of_frame(module: HloModule, frame_id: str) -> str:
    visited: set[str] = set()
    while frame_id in module.frames and frame_id not in visited:
        visited.add(frame_id)
        file, line, function, caller = module.frames[frame_id]
        if file and is_users(file):
            return written(file, int(line), function)
        frame_id = caller
    return ""


def nearest_line(module: HloModule, inside: Computation, row: Instruction) -> str:
    """The line of an instruction, of its bodies, or of the nearest instruction that has one.

    Returns:
        The line of an operand, rather than of a reader; "" if none is near.
    """
    bodies = [module.computations[name] for name in row.called if name in module.computations]
    inner = [row for body in bodies for row in (body.root, *body.instructions.values())]
    result = next(filter(None, map(partial(line_of, module), [row, *inner])), "")
    return (
        result
        or _near_line(module, inside, row, up=True)
        or _near_line(module, inside, row, up=False)
    )


def line_at(module: HloModule, row: Instruction) -> str:
    """As `nearest_line`, of an instruction in any computation."""
    line = line_of(module, row)
    if line:
        return line
    positions = (body for body in module.computations.values() if row.name in body.instructions)
    inside = next(positions, None)
    return nearest_line(module, inside, row) if inside else ""


def _near_line(module: HloModule, inside: Computation, row: Instruction, *, up: bool) -> str:
    near, visited = [row], {row.name}
    for _ in range(_STEPS):
        around = [other for at in near for other in _next_to(inside, at, up)]
        near = [other for other in around if other.name not in visited]
        visited |= {other.name for other in near}
        result = next(filter(None, map(partial(line_of, module), near)), "")
        if result:
            return result
    return ""


def _next_to(inside: Computation, row: Instruction, up: bool) -> list[Instruction]:
    if not up:
        return list(inside.users.get(row.name, ()))
    rows = inside.instructions
    return [rows[name] for name in row.operands if name in rows]


_DTYPES = {
    "bf16": "bfloat16",
    "pred": "bool",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "c64": "complex64",
    "c128": "complex128",
}
_LETTERS = {"f": "float", "s": "int", "u": "uint"}
_SCATTERS = "all-reduce-scatter"
"""Prefix of the name of a fusion's computation that is a TPU's reduce-scatter."""

WINDOWED = "windowed_dot_general_body"
"""In the names of the bodies of loops that multiply while they send; see `windowed_products`."""

_CHANNEL = re.compile(r"channel_id=(\d+)")


def dtype_name(short: str) -> str:
    """NumPy's name of one of HLO's dtypes.

    Example:
        >>> dtype_name("bf16"), dtype_name("s32"), dtype_name("f8e4m3fn")
        ('bfloat16', 'int32', 'float8_e4m3fn')
    """
    if short in _DTYPES:
        return _DTYPES[short]
    letter, bits = short[:1], short[1:]
    return f"{_LETTERS[letter]}{bits}" if letter in _LETTERS and bits.isdigit() else short


def device_ops(
    module: HloModule,
    mesh: Mesh,
    live: Mapping[str, int],
    *,
    target: str = "",
    joining: bool = True,
    slices: int | None = None,
) -> tuple[DeviceOp, ...]:
    """The operations of one device.

    Args:
        module: its program.
        mesh: over all devices of the program, in their order.
        live: bytes alive while an instruction runs, by its name.
        target: "tpu" or "gpu": the program is the host's and read as that compiler would rewrite
            it; see `collective_rewrites`. "": it is read as it is.
        joining: whether small collectives are combined as the target does; see
            `collective_combining`.
        slices: how many slices the devices are in, for devices without a slice index.
    """
    return tuple(_Reader(module, mesh, live, target, joining, slices).of(module.entry, 1, 0))


class _Reader:
    """Reads the computations of a program."""

    def __init__(
        self,
        module: HloModule,
        mesh: Mesh,
        live: Mapping[str, int],
        target: str,
        joining: bool,
        slices: int | None,
    ):
        self.module = module
        self.mesh = mesh
        self.live = live
        self.target = target
        self.joining = joining
        self.sliced = SlicedProgram(module, mesh, slices)
        self.loops = 0
        self.lines: dict[str, str] = {}
        self.awaited: dict[str, set[str]] = {}

    def of(self, inside: Computation, times: int, scope: int) -> list[DeviceOp]:
        """The operations of a computation and of those that it calls."""
        done = list(self._done(inside, times, scope))
        if self.target and self.joining:
            return joined(self.module, inside, done, self.target)
        return [op.op for op in done]

    def _done(self, inside: Computation, times: int, scope: int) -> Iterator[InstructionOp]:
        channels: set[str] = set()
        added = joined_reductions(self.module, inside) if self.target else frozenset()
        for row in inside.instructions.values():
            inner: Iterable[DeviceOp] = ()
            if row.opcode == "while":
                self.loops += 1
                body = self.module.computations[row.called[0]]
                inner = self.of(body, times * trips(self.module, inside, row), self.loops)
            elif row.opcode == "call":
                inner = self.of(self.module.computations[row.called[0]], times, scope)
            elif row.opcode == "conditional":
                bodies = [self.module.computations[name] for name in row.called]
                ways = [tuple(self.of(body, times, scope)) for body in bodies]
                inner = max(ways, key=_size, default=())
            elif row.name not in added and row.opcode not in FREE | {"copy-start"}:
                if not row.opcode.endswith("-done"):
                    ops = self._instruction(inside, row, times, scope, channels)
                    yield from (InstructionOp(row.name, op) for op in ops)
            yield from (InstructionOp("", op) for op in inner)

    def _instruction(
        self, inside: Computation, row: Instruction, times: int, scope: int, channels: set[str]
    ) -> Iterator[DeviceOp]:
        line, live = self._line(inside, row), self.live.get(row.name, 0)
        if operation(row):
            waits = bool(scope) and self._waits(inside, row)
            yield from self._collective(inside, row, times, scope, line, live, waits)
            return
        for within, inner in self._collectives_in(row):
            # An asynchronous collective is in several fusions: its start, what is computed
            # meanwhile, its end.
            channel = _CHANNEL.search(inner.attributes)
            if channel is None or channel[1] not in channels:
                channels.add(channel[1] if channel else "")
                text = line_of(self.module, inner) or line
                waits = bool(scope) and self._waits(inside, row)
                yield from self._collective(within, inner, times, scope, text, live, waits)
        costs = costs_of(self.module, inside, row)
        if costs.flops or costs.bytes:
            reordered = costs.bytes if is_reordered(self.module, inside, row) else 0.0
            yield DeviceOp(
                row.opcode, line, costs.flops, costs.bytes, dtype_name(costs.dtype), times,
                live=live, scope=scope, reordered=reordered,
            )  # fmt: skip

    def _collectives_in(self, row: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        if row.opcode not in ("fusion", "async-start", "custom-call"):
            return
        for name in row.called:
            within = self.module.computations.get(name)
            if within is None:
                continue
            for inner in within.instructions.values():
                if operation(inner):
                    yield within, inner

    def _collective(
        self,
        inside: Computation,
        row: Instruction,
        times: int,
        scope: int,
        line: str,
        live: int,
        waits: bool,
    ) -> Iterator[DeviceOp]:
        kind, size = operation(row) or ("", 0)
        outside = self.sliced.talking(row.text)
        groups = self.sliced.of_mesh(groups_of(row.text))
        axes = outside.axes or collective_axes(kind, size, groups, self.mesh)
        if not axes:
            return
        arrays = operand_arrays(inside, row) or list(row.arrays)
        costs = costs_of(self.module, inside, row)
        if kind == "reduce-scatter":
            size = sum(array.bytes for array in operand_arrays(inside, row)) or size
        count = len(groups[0]) if groups else self.mesh.size
        scatters = inside.name.startswith(_SCATTERS) or (
            self.target and is_sliced(self.module, inside, row, count)
        )
        if kind == "all-reduce" and scatters:
            kind = "reduce-scatter"
        dtype = arrays[0].dtype if arrays else ""
        if self.target and is_narrowed(self.module, inside, row, self.target):
            dtype, size = "bf16", size // 2
        yield DeviceOp(
            kind,
            line,
            bytes=costs.bytes,
            dtype=dtype_name(dtype),
            times=times,
            axes=axes,
            sent=size,
            live=live,
            scope=scope,
            waits=waits,
            slices=outside.slices or self.sliced.slice_count(groups, exact=self.joining),
        )

    def _waits(self, inside: Computation, row: Instruction) -> bool:
        """Whether an operand depends on products of this iteration, or on the one before."""
        if WINDOWED in inside.name:
            return False  # shards are sent on while others are multiplied
        names = self.awaited.get(inside.name)
        if names is None:
            kernels = dataflow(self.module, inside)
            rows = [
                (kernel.reads, kernel.writes, bool(costs_of(self.module, inside, kernel.op).flops))
                for kernel in kernels
            ]
            changing = [
                n for n, kernel in enumerate(kernels) if _changes_in_loop(inside, kernel.op)
            ]
            depends, _ = awaited(rows, changing)
            names = {k.op.name for k, late in zip(kernels, depends, strict=True) if late}
            self.awaited[inside.name] = names
        return row.name in names

    def _line(self, inside: Computation, row: Instruction) -> str:
        if row.name not in self.lines:
            self.lines[row.name] = nearest_line(self.module, inside, row)
        return self.lines[row.name]


def _changes_in_loop(inside: Computation, row: Instruction) -> bool:
    """Whether an array is an element of a loop's carry that each iteration changes."""
    source = inside.instructions.get(row.operands[0]) if row.operands else None
    if row.opcode != "get-tuple-element" or source is None or source.opcode != "parameter":
        return False
    index = int(row.attributes.partition("index=")[2].partition(",")[0])
    if inside.root.opcode != "tuple" or not any(array.sizes for array in row.arrays):
        return False
    after = inside.instructions[inside.root.operands[index]]
    same = after.opcode == "get-tuple-element" and after.operands == row.operands
    return not (same and f"index={index}," in after.attributes + ",")


def collective_axes(kind: str, size: int, groups: Groups | None, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes of a collective; of groups along no axis, all along which their devices differ.

    Args:
        kind: HLO's name of it.
        size: bytes of its result.
        groups: of devices, as indices in the mesh; None or () are all.
        mesh: over the devices of the program.
    """
    axes = axes_of(Collective(KINDS[kind], size, groups or (), 1), mesh)
    if axes is not None:
        return axes
    shape = tuple(mesh.axis_sizes)
    varying: set[int] = set()
    for group in groups or ():
        positions = np.unravel_index(np.array(group) % mesh.size, shape)
        varying |= {axis for axis, at in enumerate(positions) if len(set(at.tolist())) > 1}
    return tuple(mesh.axis_names[axis] for axis in sorted(varying))


def _size(ops: tuple[DeviceOp, ...]) -> float:
    return sum((op.flops + op.bytes + op.sent) * op.times for op in ops)
