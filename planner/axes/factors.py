"""Factors: the dimensions of one operation, and how a rule of them is put together.

A factor is one dimension of the operation, and each axis of an operand or result is a tuple of
factors, the outermost first. Most axes are one factor; a reshape splits and merges axes, so an axis
may be several there. It is Shardy's `OpShardingRule` in another notation.

>>> made = Factors([(8, 4)], [(8,)])
>>> made.tie({0: 0}, {0: 0}, 8), made.tie({0: 1}, {}, 4, reduced=True)
(0, 1)
>>> made.rule().operands, made.rule().results
((((0,), (1,)),), (((0,),),))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

Axes = tuple[tuple[int, ...], ...]
"""Of one operand or result: for each axis its factors."""

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DimensionRule:
    """How the axes of one equation belong together.

    Attributes:
        operands: of each operand, for each of its axes the factors, outermost first; () of an axis
            of size 1 that is tied to nothing.
        results: likewise.
        sizes: of each factor.
        reduced: factors that are summed or contracted, or that a table is looked up along; devices
            that split one have terms of the result.
        whole: factors that cannot stay split: an operand split along one is gathered, or neighbours
            exchange rows.
    """

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    sizes: tuple[int, ...]
    reduced: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()


class Factors:
    """A rule in the making: factors are added, and tied to axes.

    Args:
        operands: shapes.
        results: shapes.
    """

    def __init__(self, operands: Iterable[Shape], results: Iterable[Shape]) -> None:
        """No factor is tied to any axis yet."""
        self.operand_shapes = tuple(operands)
        self.result_shapes = tuple(results)
        self._operands: list[list[tuple[int, ...]]] = [[()] * len(s) for s in self.operand_shapes]
        self._results: list[list[tuple[int, ...]]] = [[()] * len(s) for s in self.result_shapes]
        self._sizes: list[int] = []
        self._reduced: set[int] = set()
        self._whole: set[int] = set()

    def tie(
        self,
        operands: Mapping[int, int],
        results: Mapping[int, int],
        size: int,
        *,
        reduced: bool = False,
        whole: bool = False,
    ) -> int:
        """Add a factor.

        Args:
            operands: number of an operand -> its axis that has the factor, inside of those it has.
            results: likewise.
            size: of the factor.
            reduced: it is summed.
            whole: it cannot stay split.

        Returns:
            The number of the factor.
        """
        number = len(self._sizes)
        self._sizes.append(int(size))
        if reduced:
            self._reduced.add(number)
        if whole:
            self._whole.add(number)
        for operand, axis in operands.items():
            self._operands[operand][axis] += (number,)
        for result, axis in results.items():
            self._results[result][axis] += (number,)
        return number

    def rule(self, *, rest_whole: bool = False) -> DimensionRule:
        """Finish: an axis without a factor gets one of its own.

        Args:
            rest_whole: those cannot stay split.
        """
        for axes, shapes in (
            (self._operands, self.operand_shapes),
            (self._results, self.result_shapes),
        ):
            for mine, shape in zip(axes, shapes, strict=True):
                for axis, size in enumerate(shape):
                    if not mine[axis] and size != 1:
                        mine[axis] = (len(self._sizes),)
                        if rest_whole:
                            self._whole.add(len(self._sizes))
                        self._sizes.append(int(size))
        return DimensionRule(
            tuple(map(tuple, self._operands)),
            tuple(map(tuple, self._results)),
            tuple(self._sizes),
            frozenset(self._reduced),
            frozenset(self._whole),
        )
