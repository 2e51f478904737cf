"""The operations of a compiled program, in the order in which one device runs them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

import numpy as np
from jax.sharding import Mesh

from isoshard.core.planner.costs.device_program import DeviceOp
from isoshard.core.runtime.hlo_collectives import (
    KINDS,
    Collective,
    Groups,
    axes_of,
    groups_of,
    operation,
)

from .hlo_costs import FREE, Costs, costs_of, operand_arrays
from .hlo_text import Computation, HloModule, Instruction
from .loop_trips import trips

_DTYPES = {
    "bf16": "bfloat16",
    "pred": "bool",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "c64": "complex64",
    "c128": "complex128",
}
_LETTERS = {"f": "float", "s": "int", "u": "uint"}
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
    module: HloModule, mesh: Mesh, live: Mapping[str, int], *, scatters: bool = False
) -> tuple[DeviceOp, ...]:
    """List what one device does.

    Args:
        module: its program.
        mesh: over all devices of the program, in their order.
        live: bytes alive while an instruction runs, by its name.
        scatters: whether a reduction of which each device keeps its slice is a reduce-scatter, as
            the compilers of TPUs and GPUs make it; the host's compiler leaves it as it is.
    """
    return tuple(_Reader(module, mesh, live, scatters).of(module.entry, 1, 0))


class _Reader:
    """A way through a program's computations."""

    def __init__(self, module: HloModule, mesh: Mesh, live: Mapping[str, int], scatters: bool):
        self.module = module
        self.mesh = mesh
        self.live = live
        self.scatters = scatters
        self.loops = 0
        self.lines: dict[str, str] = {}

    def of(self, inside: Computation, times: int, scope: int) -> Iterator[DeviceOp]:
        """What one computation does, and those that it calls."""
        sent: set[str] = set()
        for one in inside.instructions.values():
            if one.opcode == "while":
                self.loops += 1
                body = self.module.computations[one.called[0]]
                runs = times * trips(self.module, inside, one)
                yield from self.of(body, runs, self.loops)
            elif one.opcode == "call":
                yield from self.of(self.module.computations[one.called[0]], times, scope)
            elif one.opcode == "conditional":
                bodies = [self.module.computations[name] for name in one.called]
                ways = [tuple(self.of(body, times, scope)) for body in bodies]
                yield from max(ways, key=_size, default=())
            elif one.opcode not in FREE and not one.opcode.endswith("-done"):
                yield from self._of_one(inside, one, times, scope, sent)

    def _of_one(
        self, inside: Computation, one: Instruction, times: int, scope: int, sent: set[str]
    ) -> Iterator[DeviceOp]:
        line, live = self._line(inside, one), self.live.get(one.name, 0)
        if operation(one.text):
            yield from self._collective(inside, one, one, times, scope)
            return
        for within, inner in self._collectives_in(one):
            # One that runs beside others stands in several fusions: its start, what is computed
            # meanwhile, its end.
            channel = _CHANNEL.search(inner.attributes)
            if channel is None or channel[1] not in sent:
                sent.add(channel[1] if channel else "")
                yield from self._collective(within, inner, one, times, scope, line)
        costs = costs_of(self.module, inside, one)
        if costs.flops or costs.bytes:
            yield DeviceOp(
                one.opcode, line, costs.flops, costs.bytes, dtype_name(costs.dtype), times,
                live=live, scope=scope,
            )  # fmt: skip

    def _collectives_in(self, one: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        if one.opcode not in ("fusion", "async-start", "custom-call"):
            return
        for name in one.called:
            within = self.module.computations.get(name)
            for inner in within.instructions.values() if within else ():
                if operation(inner.text):
                    yield within, inner

    def _collective(
        self,
        inside: Computation,
        one: Instruction,
        shown: Instruction,
        times: int,
        scope: int,
        line: str = "",
    ) -> Iterator[DeviceOp]:
        kind, size = operation(one.text) or ("", 0)
        groups = groups_of(one.text)
        axes = axes_along(kind, size, groups, self.mesh)
        if not axes:
            return
        arrays = operand_arrays(inside, one) or list(one.arrays)
        costs = costs_of(self.module, inside, one)
        if kind == "reduce-scatter":
            size = sum(array.bytes for array in operand_arrays(inside, one)) or size
        if self.scatters and kind == "all-reduce" and self._is_sliced(inside, one, groups):
            kind = "reduce-scatter"
        yield DeviceOp(
            kind,
            line or self._line(inside, one),
            bytes=costs.bytes,
            dtype=dtype_name(arrays[0].dtype) if arrays else "",
            times=times,
            axes=axes,
            sent=size,
            live=self.live.get(shown.name, 0),
            scope=scope,
            waits=bool(scope) and self._waits(inside, one),
        )

    def _is_sliced(self, inside: Computation, one: Instruction, groups: Groups | None) -> bool:
        """Whether each device uses no more of a reduction than its slice."""
        users = inside.users[one.name]
        count = len(groups[0]) if groups else self.mesh.size
        if len(one.arrays) != 1 or not users:
            return False
        whole = math.prod(one.arrays[0].sizes)
        return all(self._takes(inside, user, one.name, whole, count) for user in users)

    def _takes(
        self, inside: Computation, user: Instruction, name: str, whole: int, count: int
    ) -> bool:
        """Whether an instruction uses only one of `count` slices of an operand."""
        if user.opcode == "dynamic-slice":
            return math.prod(user.arrays[0].sizes) * count == whole
        if user.opcode in ("bitcast", "copy", "reshape", "transpose", "convert"):
            inner = inside.users[user.name]
            return bool(inner) and all(
                self._takes(inside, one, user.name, whole, count) for one in inner
            )
        if user.opcode != "fusion":
            return False
        body = self.module.computations[user.called[0]]
        given = [
            p for p, operand in zip(body.parameters, user.operands, strict=True) if operand == name
        ]
        return all(
            body.users[p.name]
            and all(self._takes(body, one, p.name, whole, count) for one in body.users[p.name])
            for p in given
        )

    def _waits(self, inside: Computation, one: Instruction) -> bool:
        """Whether an operand is computed in the same run of the loop."""
        stack, seen = list(one.operands), set()
        while stack:
            name = stack.pop()
            found = inside.instructions.get(name)
            if found is None or name in seen:
                continue
            seen.add(name)
            if costs_of(self.module, inside, found).flops or operation(found.text):
                return True
            stack += found.operands
        return False

    def _line(self, inside: Computation, one: Instruction) -> str:
        if one.name not in self.lines:
            self.lines[one.name] = self._near(inside, one)
        return self.lines[one.name]

    def _near(self, inside: Computation, one: Instruction) -> str:
        """The line of an instruction, of what it does inside, or of the nearest that has one."""
        for name in (one.name, *(name for name in one.called)):
            body = self.module.computations.get(name)
            inner = [one] if body is None else [body.root, *body.instructions.values()]
            found = next(filter(None, map(self.module.line_of, inner)), "")
            if found:
                return found
        for next_to in (self._operands, self._users):
            near, seen = [one], {one.name}
            for _ in range(6):
                near = [n for at in near for n in next_to(inside, at) if n.name not in seen]
                seen |= {n.name for n in near}
                found = next(filter(None, map(self.module.line_of, near)), "")
                if found:
                    return found
        return ""

    @staticmethod
    def _operands(inside: Computation, one: Instruction) -> list[Instruction]:
        known = inside.instructions
        return [known[name] for name in one.operands if name in known]

    @staticmethod
    def _users(inside: Computation, one: Instruction) -> list[Instruction]:
        return list(inside.users.get(one.name, ()))


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
