"""Numbers of Python that are inputs of a captured step: learning rates, and what changed before.

While a step is captured, such a number is replaced where Python keeps it by a symbol
(`symbolic_numbers`), which is put back to the number afterwards. What the step itself makes of it,
an attribute that it multiplies by 0.99, is written there again after each replay.

>>> import types
>>> from isoshard.torch_bridge.engine.capture.holders import Names
>>> trainer = types.SimpleNamespace(beta=0.5)
>>> table = Table()
>>> numbers = Numbers(table, [Names(vars(trainer), ("beta",), "trainer.")])
>>> with numbers:
...     trainer.beta = trainer.beta * 0.5
>>> numbers.settle([])
>>> trainer.beta, numbers.written[0][1].node.value
(0.25, 0.25)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from isoshard.torch_bridge.engine.values.symbolic_numbers import Table, settled

from .holders import Holder


class Numbers:
    """Context in which numbers are symbols where Python keeps them.

    Args:
        table: where expressions are kept.
        places: holders of one float each.

    Attributes:
        written: holders to which the step gave an expression of symbols, and the expression.
    """

    def __init__(self, table: Table, places: Sequence[Holder]):
        """See the class."""
        self._table = table
        self._places = places
        self._symbols: list[tuple[Holder, float, torch.SymFloat]] = []
        self.written: list[tuple[Holder, torch.SymFloat]] = []

    def __enter__(self) -> None:
        """Put symbols there."""
        for place in self._places:
            value = settled(place.read()[0])
            if type(value) is float:
                symbol = self._table.symbol(functools.partial(_present, place), value)
                self._symbols.append((place, value, symbol))
                place.put_back([symbol])

    def __exit__(self, *exc: object) -> None:
        """Put the numbers back where the step left them alone."""
        for place, value, symbol in self._symbols:
            if place.read()[0] is symbol:
                place.put_back([value])

    def settle(self, holders: Iterable[Holder]) -> None:
        """Replace the expressions that the step put somewhere by their present values.

        Args:
            holders: where they may be, besides the places of the numbers themselves.
        """
        for holder in (*self._places, *holders):
            for number, value in enumerate(holder.read()):
                mine = isinstance(value, torch.SymFloat) and value.node.table is self._table
                place = holder.single(number) if mine else None
                if place is not None:
                    self.written.append((place, value))
                    place.put_back([value.node.value])

    def put_back(self) -> None:
        """Let Python hold the numbers that it held before the step."""
        for place, value, _ in self._symbols:
            place.put_back([value])

    def inputs(self) -> frozenset[tuple[int, Any]]:
        """The addresses of the numbers that were symbols."""
        return frozenset(place.address(0) for place, _, _ in self._symbols)

    def outputs(self) -> frozenset[tuple[int, Any]]:
        """The addresses to which a replay writes."""
        return frozenset(place.address(0) for place, _ in self.written)


def _present(place: Holder) -> float:
    return float(settled(place.read()[0]))
