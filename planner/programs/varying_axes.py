"""The mesh axes along which a value of a partitioned program differs between devices.

The program is one device's, without the shardings of its values. They are propagated: an argument
varies along the axes of its spec, a result wherever an operand does; after a gather or a sum along
an axis a value is replicated along it, and `partition-id` varies along all.

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
>>> varying = varying_axes(module, mesh, [("model",), ("data", "model")])
>>> [sorted(varying[name][0]) for name in ("w", "all", "sum")]
[['data', 'model'], ['model'], ['model']]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh

from isoshard.core.kit import Computation, HloModule, Instruction, groups_of, operation

from .device_ops import collective_axes
from .hlo_liveness import tuple_offsets

Varying = tuple[frozenset[str], ...]
"""Axes of each array of a result, in order."""

_AGREE = frozenset(("all-gather", "all-reduce", "collective-broadcast"))
"""Collectives with the same result on all devices of a group; results of others vary."""


def varying_axes(
    module: HloModule, mesh: Mesh, arguments: Sequence[Iterable[str]]
) -> Mapping[str, Varying]:
    """The axes along which the results of a program's instructions vary.

    Returns:
        By name of an instruction the axes of each array of its result. A value that is the same
        on all devices, though computed from varying ones, counts as varying.
    """
    propagation = _AxisPropagation(module, mesh)
    propagation.run(module.entry, [(frozenset(axes),) for axes in arguments])
    return propagation.axes_of


class _AxisPropagation:
    """Propagates varying axes through a program."""

    def __init__(self, module: HloModule, mesh: Mesh):
        self.module = module
        self.mesh = mesh
        self.axes_of: dict[str, Varying] = {}

    def run(self, inside: Computation, arguments: Sequence[Varying]) -> Varying:
        """The varying axes of a computation's result."""
        self.axes_of |= zip(
            (parameter.name for parameter in inside.parameters), arguments, strict=True
        )
        for row in inside.instructions.values():
            if row.opcode != "parameter":
                self.axes_of[row.name] = self._of(inside, row)
        return self.axes_of[inside.root.name]

    def _of(self, inside: Computation, row: Instruction) -> Varying:
        operands = [self.axes_of[name] for name in row.operands]
        if row.opcode == "tuple":
            return tuple(axes for operand in operands for axes in operand)
        if row.opcode == "get-tuple-element":
            source = inside.instructions[row.operands[0]]
            start = tuple_offsets(source.shape)[
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
            axes = set(collective_axes(kind, size, groups_of(row.text), self.mesh))
            every = every - axes if kind in _AGREE else every | axes
        return (every,) * len(row.arrays)

    def _loop(self, row: Instruction, carry: Varying) -> Varying:
        """The fixed point of a loop's carry: what varies after one iteration varies before it."""
        body = self.module.computations[row.called[0]]
        while True:
            after = self.run(body, [carry])
            joined = tuple(old | new for old, new in zip(carry, after, strict=True))
            if joined == carry:
                return joined
            carry = joined
