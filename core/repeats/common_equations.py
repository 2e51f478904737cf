"""Equal equations outside of loops are computed once.

The same factor is computed for each parameter of an optimizer. Computed once it is the same value
for all of them, and its readers can be batched. Inside loops nothing changes, as there all
iterations must be equal.

>>> import jax
>>> flow = EquationFlow.of(jax.make_jaxpr(lambda x, y: ((1.0 - x) * 2.0, (1.0 - x) * y))(1.0, 2.0))
>>> flow.operands
[(-1, 0), (2, -2), (-3, 0), (4, 1)]
>>> reduced, _, skipped = eliminate_common(flow, [0, 1, 0, 1], [])
>>> reduced.operands, skipped                           # the second difference is the first
([(-1, 0), (2, -2), (-3, 0), (2, 1)], {2})
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from isoshard.core.repeats.equation_flow import BARRIERS, EquationFlow, readers_of
from isoshard.core.repeats.repeated_block import RepeatedBlock


def eliminate_common(
    flow: EquationFlow, keys: Sequence[int], blocks: Sequence[RepeatedBlock]
) -> tuple[EquationFlow, list[RepeatedBlock], set[int]]:
    """Redirect all readers of equal equations to the first of them.

    Returns:
        The flow and the loops, with the same indices, and the equations that have no readers now.
    """
    inside = {time for block in blocks for time in range(block.start, block.stop)}
    first_of: dict[Hashable, int] = {}
    alias: dict[int, int] = {}
    skipped: set[int] = set()
    operands = list(flow.operands)
    for time, equation in enumerate(flow.equations):
        if not alias.keys().isdisjoint(operands[time]):
            operands[time] = tuple([alias.get(operand, operand) for operand in operands[time]])
        if time in inside or equation.effects or equation.primitive.name in BARRIERS:
            continue
        read = tuple(
            [operand if operand >= 0 else _literal(flow, operand) for operand in operands[time]]
        )
        key = keys[time], equation.params.get("start_indices"), read
        first = first_of.setdefault(key, time)
        if first != time:
            skipped.add(time)
            alias.update(zip(flow.outputs[time], flow.outputs[first], strict=True))
    readers = readers_of(operands, len(flow.avals), skipped)
    results = [alias.get(value, value) for value in flow.results]
    flow = dataclasses.replace(flow, operands=operands, readers=readers, results=results)
    indices = np.arange(len(flow.avals))
    indices[[*alias]] = [*alias.values()]
    return flow, [_moved(flow, block, indices) for block in blocks], skipped


def _literal(flow: EquationFlow, operand: int) -> Hashable:
    return flow.literal(operand).tobytes(), flow.aval(operand)


def _moved(
    flow: EquationFlow, block: RepeatedBlock, alias: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> RepeatedBlock:
    operands = np.where(block.operands >= 0, alias[block.operands], block.operands)
    return dataclasses.replace(block, flow=flow, operands=operands)
