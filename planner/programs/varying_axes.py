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

from isoshard.core.runtime.hlo_collectives import groups_of, operation
from isoshard.core.runtime.hlo_text import Computation, HloModule, Instruction

from .device_ops import axes_along
from .live_values import places_in

Varying = tuple[frozenset[str], ...]
"""Axes of each array of a result, in order."""

_AGREE = frozenset(("all-gather", "all-reduce", "collective-broadcast"))
"""After these, devices that talk hold the same; after the other collectives they differ."""


def varying_axes(
    module: HloModule, mesh: Mesh, given: Sequence[Iterable[str]]
) -> Mapping[str, Varying]:
    """Follow a program.

    Args:
        module: of one device.
        mesh: over all devices of the program, in their order.
        given: of each argument, the mesh axes that it is split along.

    Returns:
        By name of an instruction the axes of each array of its result. A value that is the same
        on all devices, though it is made of some that differ, counts as varying.
    """
    way = _Way(module, mesh)
    way.run(module.entry, [(frozenset(axes),) for axes in given])
    return way.found


class _Way:
    """Through a program, with what was found so far."""

    def __init__(self, module: HloModule, mesh: Mesh):
        self.module = module
        self.mesh = mesh
        self.found: dict[str, Varying] = {}

    def run(self, inside: Computation, given: Sequence[Varying]) -> Varying:
        """Follow a computation: the axes of its result."""
        self.found |= zip((one.name for one in inside.parameters), given, strict=True)
        for one in inside.instructions.values():
            if one.opcode != "parameter":
                self.found[one.name] = self._of(inside, one)
        return self.found[inside.root.name]

    def _of(self, inside: Computation, one: Instruction) -> Varying:
        operands = [self.found[name] for name in one.operands]
        if one.opcode == "tuple":
            return tuple(axes for operand in operands for axes in operand)
        if one.opcode == "get-tuple-element":
            source = inside.instructions[one.operands[0]]
            start = places_in(source.shape)[
                int(one.attributes.partition("index=")[2].split(",")[0])
            ]
            return operands[0][start : start + len(one.arrays)]
        if one.opcode == "while":
            return self._loop(one, operands[0])
        if one.opcode in ("fusion", "call"):
            return self.run(self.module.computations[one.called[0]], operands)
        every = frozenset[str]().union(*(axes for operand in operands for axes in operand))
        if one.opcode == "conditional":
            bodies = [self.module.computations[name] for name in one.called]
            ways = [self.run(b, [o]) for b, o in zip(bodies, operands[1:], strict=True)]
            return tuple(every.union(*axes) for axes in zip(*ways, strict=True))
        if one.opcode == "partition-id":
            every = frozenset(self.mesh.axis_names)
        if sends := operation(one):
            kind, size = sends
            axes = set(axes_along(kind, size, groups_of(one.text), self.mesh))
            every = every - axes if kind in _AGREE else every | axes
        return (every,) * len(one.arrays)

    def _loop(self, one: Instruction, carried: Varying) -> Varying:
        """A loop's carry: what differs in one run may differ before the next."""
        body = self.module.computations[one.called[0]]
        while True:
            after = self.run(body, [carried])
            known = tuple(old | new for old, new in zip(carried, after, strict=True))
            if known == carried:
                return known
            carried = known
