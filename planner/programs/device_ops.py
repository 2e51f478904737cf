"""The operations of a compiled program, in the order in which one device runs them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from jax.sharding import Mesh

from isoshard.core.runtime.hlo_collectives import (
    KINDS,
    Collective,
    Groups,
    axes_of,
    groups_of,
    operation,
)
from isoshard.core.runtime.hlo_text import Computation, HloModule, Instruction
from isoshard.planner.costs.device_program import DeviceOp

from .hlo_costs import FREE, Costs, costs_of, operand_arrays
from .joined_collectives import SentBy, joined
from .layout_moves import is_reordered
from .loop_trips import trips
from .nearest_lines import line_of, nearest_line
from .sliced_programs import SlicedProgram
from .target_rewrites import is_narrowed, is_sliced, joined_reductions

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
"""What the name of a fusion's computation begins with that is a reduce-scatter of a TPU."""

WINDOWED = "windowed_dot_general_body"
"""What the name of a loop's body has in it that multiplies while it sends; see `windowed_loops`."""

_CHANNEL = re.compile(r"channel_id=(\d+)")


def dtype_name(short: str) -> str:
    """NumPy's name of one of HLO's dtypes.

    Args:
        short: such as "bf16".

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
    """List what one device does.

    Args:
        module: its program.
        mesh: over all devices of the program, in their order.
        live: bytes alive while an instruction runs, by its name.
        target: "tpu" or "gpu": the program is the host's and read as the compiler of one would
            have it; see `target_rewrites`. "": it is read as it is.
        joining: whether small collectives are one where it sends them so; see
            `joined_collectives`.
        slices: how many slices the devices are in, if they do not know.
    """
    return tuple(_Reader(module, mesh, live, target, joining, slices).of(module.entry, 1, 0))


class _Reader:
    """A way through a program's computations."""

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
        self.places = SlicedProgram(module, mesh, slices)
        self.loops = 0
        self.lines: dict[str, str] = {}

    def of(self, inside: Computation, times: int, scope: int) -> list[DeviceOp]:
        """What one computation does, and those that it calls."""
        done = list(self._done(inside, times, scope))
        if self.target and self.joining:
            return joined(self.module, inside, done, self.target)
        return [one.op for one in done]

    def _done(self, inside: Computation, times: int, scope: int) -> Iterator[SentBy]:
        sent: set[str] = set()
        added = joined_reductions(self.module, inside) if self.target else frozenset()
        for one in inside.instructions.values():
            inner: Iterable[DeviceOp] = ()
            if one.opcode == "while":
                self.loops += 1
                body = self.module.computations[one.called[0]]
                inner = self.of(body, times * trips(self.module, inside, one), self.loops)
            elif one.opcode == "call":
                inner = self.of(self.module.computations[one.called[0]], times, scope)
            elif one.opcode == "conditional":
                bodies = [self.module.computations[name] for name in one.called]
                ways = [tuple(self.of(body, times, scope)) for body in bodies]
                inner = max(ways, key=_size, default=())
            elif one.name not in added and one.opcode not in FREE | {"copy-start"}:
                if not one.opcode.endswith("-done"):
                    ops = self._of_one(inside, one, times, scope, sent)
                    yield from (SentBy(one.name, op) for op in ops)
            yield from (SentBy("", op) for op in inner)

    def _of_one(
        self, inside: Computation, one: Instruction, times: int, scope: int, sent: set[str]
    ) -> Iterator[DeviceOp]:
        line, live = self._line(inside, one), self.live.get(one.name, 0)
        if operation(one):
            waits = bool(scope) and self._waits(inside, one)
            yield from self._collective(inside, one, times, scope, line, live, waits)
            return
        for within, inner in self._collectives_in(one):
            # One that runs beside others stands in several fusions: its start, what is computed
            # meanwhile, its end.
            channel = _CHANNEL.search(inner.attributes)
            if channel is None or channel[1] not in sent:
                sent.add(channel[1] if channel else "")
                said = line_of(self.module, inner) or line
                waits = bool(scope) and self._waits(inside, one)
                yield from self._collective(within, inner, times, scope, said, live, waits)
        costs = costs_of(self.module, inside, one)
        if costs.flops or costs.bytes:
            reordered = costs.bytes if is_reordered(self.module, inside, one) else 0.0
            yield DeviceOp(
                one.opcode, line, costs.flops, costs.bytes, dtype_name(costs.dtype), times,
                live=live, scope=scope, reordered=reordered,
            )  # fmt: skip

    def _collectives_in(self, one: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        if one.opcode not in ("fusion", "async-start", "custom-call"):
            return
        for name in one.called:
            within = self.module.computations.get(name)
            if within is None:
                continue
            for inner in within.instructions.values():
                if operation(inner):
                    yield within, inner

    def _collective(
        self,
        inside: Computation,
        one: Instruction,
        times: int,
        scope: int,
        line: str,
        live: int,
        waits: bool,
    ) -> Iterator[DeviceOp]:
        kind, size = operation(one) or ("", 0)
        outside = self.places.talking(one.text)
        groups = self.places.of_mesh(groups_of(one.text))
        axes = outside.axes or axes_along(kind, size, groups, self.mesh)
        if not axes:
            return
        arrays = operand_arrays(inside, one) or list(one.arrays)
        costs = costs_of(self.module, inside, one)
        if kind == "reduce-scatter":
            size = sum(array.bytes for array in operand_arrays(inside, one)) or size
        count = len(groups[0]) if groups else self.mesh.size
        scatters = inside.name.startswith(_SCATTERS) or (
            self.target and is_sliced(self.module, inside, one, count)
        )
        if kind == "all-reduce" and scatters:
            kind = "reduce-scatter"
        dtype = arrays[0].dtype if arrays else ""
        if self.target and is_narrowed(self.module, inside, one, self.target):
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
            slices=outside.slices or self.places.met(groups, exact=self.joining),
        )

    def _waits(self, inside: Computation, one: Instruction) -> bool:
        """Whether an operand follows from products of this run of a loop, or from its last run."""
        if WINDOWED in inside.name:
            return False  # parts are sent on while others are multiplied
        stack, seen = list(one.operands), set[str]()
        while stack:
            found = inside.instructions.get(stack.pop())
            if found is None or found.name in seen:
                continue
            seen.add(found.name)
            if costs_of(self.module, inside, found).flops or _is_carried(inside, found):
                return True
            stack += found.operands
        return False

    def _line(self, inside: Computation, one: Instruction) -> str:
        if one.name not in self.lines:
            self.lines[one.name] = nearest_line(self.module, inside, one)
        return self.lines[one.name]


def _is_carried(inside: Computation, one: Instruction) -> bool:
    """Whether an array is an element of a loop's carry that each run changes."""
    source = inside.instructions.get(one.operands[0]) if one.operands else None
    if one.opcode != "get-tuple-element" or source is None or source.opcode != "parameter":
        return False
    index = int(one.attributes.partition("index=")[2].partition(",")[0])
    if inside.root.opcode != "tuple" or not any(array.sizes for array in one.arrays):
        return False
    after = inside.instructions[inside.root.operands[index]]
    same = after.opcode == "get-tuple-element" and after.operands == one.operands
    return not (same and f"index={index}," in after.attributes + ",")


def axes_along(kind: str, size: int, groups: Groups | None, mesh: Mesh) -> tuple[str, ...]:
    """The axes of a mesh along which a collective talks; of one across them all it touches.

    Args:
        kind: HLO's name of it.
        size: bytes of its result.
        groups: who talks to whom, as places in the mesh; None or () are all.
        mesh: over the devices of the program.
    """
    found = axes_of(Collective(KINDS[kind], size, groups or (), 1), mesh)
    if found is not None:
        return found
    shape = tuple(mesh.axis_sizes)
    varying: set[int] = set()
    for group in groups or ():
        places = np.unravel_index(np.array(group) % mesh.size, shape)
        varying |= {axis for axis, at in enumerate(places) if len(set(at.tolist())) > 1}
    return tuple(mesh.axis_names[axis] for axis in sorted(varying))


def _size(ops: tuple[DeviceOp, ...]) -> float:
    return sum((op.flops + op.bytes + op.sent) * op.times for op in ops)


def total(ops: tuple[DeviceOp, ...]) -> Costs:
    """Flops and bytes of one step.

    Args:
        ops: of one device.
    """
    return Costs(sum(o.flops * o.times for o in ops), sum(o.bytes * o.times for o in ops), "")
