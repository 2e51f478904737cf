"""Along which mesh axes the devices of a partitioned program hold different values.

The program is one device's, and does not say how its values are laid out. But it can be followed:
an argument differs along the axes that its layout names, a result wherever an operand does; a
gather or a sum along an axis makes devices agree along it, and `partition-id` differs along all.

>>> from isoshard import make_mesh
>>> from isoshard.core.runtime.hlo_text import parsed
>>> module = parsed('''
... HloModule step
... ENTRY %main (x: f32[4], w: f32[2]) -> f32[4] {
...   %x = f32[4]{0} parameter(0)
...   %w = f32[2]{0} parameter(1)
...   %all = f32[4]{0} all-gather(%w), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}
...   ROOT %sum = f32[4]{0} add(%x, %all)
... }''')
>>> mesh = make_mesh((2, 4), ("data", "model"))
>>> found = varying_axes(module, mesh, [("model",), ("data", "model")])
>>> [sorted(found[name][0]) for name in ("w", "all", "sum")]
[['data', 'model'], ['model'], ['model']]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh

from isoshard.core.kit import Computation, HloModule, Instruction, groups_of, operation

from .device_ops import axes_along
from .hlo_liveness import places_in

Varying = tuple[frozenset[str], ...]
"""Axes of each array of a result, in order."""

_AGREE = frozenset(("all-gather", "all-reduce", "collective-broadcast"))
"""After these, devices that talk hold the same; after the other collectives they differ."""


def varying_axes(
    module: HloModule, mesh: Mesh, arguments: Sequence[Iterable[str]]
) -> Mapping[str, Varying]:
    """Follow a program.

    Returns:
        By name of an instruction the axes of each array of its result. A value that is the same
        on all devices, though it is made of some that differ, counts as varying.
    """
    way = _Way(module, mesh)
    way.run(module.entry, [(frozenset(axes),) for axes in arguments])
    return way.found


class _Way:
    """Through a program, with what was found so far."""

    def __init__(self, module: HloModule, mesh: Mesh):
        self.module = module
        self.mesh = mesh
        self.found: dict[str, Varying] = {}

    def run(self, inside: Computation, arguments: Sequence[Varying]) -> Varying:
        """Follow a computation: the axes of its result."""
        self.found |= zip(
            (parameter.name for parameter in inside.parameters), arguments, strict=True
        )
        for row in inside.instructions.values():
            if row.opcode != "parameter":
                self.found[row.name] = self._of(inside, row)
        return self.found[inside.root.name]

    def _of(self, inside: Computation, row: Instruction) -> Varying:
        operands = [self.found[name] for name in row.operands]
        if row.opcode == "tuple":
            return tuple(axes for operand in operands for axes in operand)
        if row.opcode == "get-tuple-element":
            source = inside.instructions[row.operands[0]]
            start = places_in(source.shape)[
                int(row.attributes.partition("index=")[2].split(",")[0])
            ]
            return operands[0][start : start + len(row.arrays)]
        if row.opcode == "while":
            return self._loop(row, operands[0])
        if row.opcode in ("fusion", "call"):
            return self.run(self.module.computations[row.called[0]], operands)
        every = frozenset[str]().union(*(axes for operand in operands for axes in operand))
        if row.opcode == "conditional":
            bodies = [self.module.computations[name] for name in row.called]
            ways = [self.run(b, [o]) for b, o in zip(bodies, operands[1:], strict=True)]
            return tuple(every.union(*axes) for axes in zip(*ways, strict=True))
        if row.opcode == "partition-id":
            every = frozenset(self.mesh.axis_names)
        if sends := operation(row):
            kind, size = sends
            axes = set(axes_along(kind, size, groups_of(row.text), self.mesh))
            every = every - axes if kind in _AGREE else every | axes
        return (every,) * len(row.arrays)

    def _loop(self, row: Instruction, carried: Varying) -> Varying:
        """A loop's carry: what differs in one run may differ before the next."""
        body = self.module.computations[row.called[0]]
        while True:
            after = self.run(body, [carried])
            loop = tuple(old | new for old, new in zip(carried, after, strict=True))
            if loop == carried:
                return loop
            carried = loop
