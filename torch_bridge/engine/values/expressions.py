"""The present values of the expressions of a captured step.

An optimizer computes the same expressions for each parameter: of its own step count, which is the
same as that of the others. So this is CSE by value: symbols that were equal when first read are
taken for one as long as they still are, and their expressions are computed once; else each for
itself.

>>> import operator
>>> steps = [2.0, 2.0]
>>> rows = [(lambda: steps[0], ()), (lambda: steps[1], ()), (0.5, ())]
>>> rows += [(operator.pow, (2, 0)), (operator.pow, (2, 1))]
>>> found = Rows(rows)
>>> present = found.values()
>>> present[3], present[4], len(present.numbers)
(0.25, 0.25, 3)
>>> steps[1] = 3.0
>>> present = found.values()
>>> present[3], present[4], len(present.numbers)
(0.25, 0.125, 5)
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(eq=False, slots=True)
class Present:
    """The values of rows.

    Attributes:
        numbers: values; equal ones may be there once.
        where: for each row, which of them; the same object as long as nothing moves.
    """

    numbers: list[Any]
    where: list[int]

    def __getitem__(self, row: int) -> Any:
        """The value of a row."""
        return self.numbers[self.where[row]]


@dataclasses.dataclass(frozen=True, eq=False)
class Listed:
    """Reads a symbol: a number in a list.

    Attributes:
        numbers: the list, which others change.
        index: in it.
    """

    numbers: list[Any]
    index: int

    def __call__(self) -> Any:
        """The present number."""
        return self.numbers[self.index]


class Rows:
    """The rows of a table, to be evaluated again and again.

    Args:
        rows: as of `symbolic_numbers.Table`.

    Attributes:
        count: how many there are.
    """

    def __init__(self, rows: Sequence[tuple[Any, tuple[int, ...]]]):
        """Read the symbols once, to see which are equal."""
        self.count = len(rows)
        self._read = _joint_reader([what for what, taken in rows if not taken and callable(what)])
        firsts: dict[Any, int] = {}
        read = self._read()
        like = [firsts.setdefault((type(value), repr(value)), n) for n, value in enumerate(read)]
        self._others = [n for n, first in enumerate(like) if first != n]
        self._firsts = [like[n] for n in self._others]
        same_first = len(self._others) > 1 and len(set(self._firsts)) == 1
        self._select = operator.itemgetter(*self._others) if same_first else None
        self._folded = _Order(rows, like)
        self._every = _Order(rows, range(len(like))) if self._others else self._folded
        self._last = read, self._folded.values(read)

    def values(self) -> Present:
        """Read the symbols, and compute what depends on them; the same object if none changed."""
        read = self._read()
        last, present = self._last
        if not all(map(operator.is_, read, last)):
            present = (self._folded if self._are_equal(read) else self._every).values(read)
            self._last = read, present
        return present

    def _are_equal(self, read: list[Any]) -> bool:
        """Whether the symbols that were equal are still so, to the last bit."""
        if self._select is not None:  # as the step counts of an optimizer: one look in C
            first, others = read[self._firsts[0]], self._select(read)
            same = others.count(first) == len(others) and bool(first)  # 0.0 is equal to -0.0
            return same and set(map(type, others)) == {type(first)}
        others = list(map(read.__getitem__, self._others))
        firsts = list(map(read.__getitem__, self._firsts))
        same = others == firsts and all(others)
        return same and list(map(type, others)) == list(map(type, firsts))


def _joint_reader(reads: Sequence[Callable[[], Any]]) -> Callable[[], list[Any]]:
    """A function that reads all symbols: those of one list at once, if they follow the others."""
    listed = [read for read in reads if isinstance(read, Listed)]
    first = len(reads) - len(listed)
    requested = reads[:first]
    interleaved = any(isinstance(read, Listed) for read in requested)
    if len(listed) < 2 or interleaved or len({id(read.numbers) for read in listed}) > 1:
        return lambda: [read() for read in reads]
    indices, get = listed[0].numbers, operator.itemgetter(*(read.index for read in listed))
    return lambda: [*(read() for read in requested), *get(indices)]


class _Order:
    """Rows without those that are the same as others.

    Args:
        rows: as of `Rows`.
        like: for each symbol, the first one that is equal to it.
    """

    def __init__(self, rows: Sequence[tuple[Any, tuple[int, ...]]], like: Sequence[int]):
        """Number what is left: symbols, then constants, then what is computed."""
        symbols = [row for row, (what, taken) in enumerate(rows) if not taken and callable(what)]
        constants = [row for row, (what, _) in enumerate(rows) if not callable(what)]
        self._symbols = [n for n, first in enumerate(like) if first == n]
        self._constants = [rows[row][0] for row in constants]
        where = dict(zip(constants, itertools.count(len(self._symbols))))
        index_of = {first: index for index, first in enumerate(self._symbols)}
        where |= {row: index_of[first] for row, first in zip(symbols, like, strict=True)}
        steps: list[tuple[Callable[..., Any], tuple[int, ...]]] = []
        rows_of: dict[Any, int] = {}
        for row, (function, operands) in enumerate(rows):
            if operands:
                step = (function, tuple([where[operand] for operand in operands]))
                if step not in rows_of:
                    rows_of[step] = len(self._symbols) + len(constants) + len(steps)
                    steps.append(step)
                where[row] = rows_of[step]
        self._where = [where[row] for row in range(len(rows))]
        self._calls = [(function, taking(operands)) for function, operands in steps]

    def values(self, read: list[Any]) -> Present:
        """Compute from what the symbols are now."""
        done = [read[symbol] for symbol in self._symbols] + self._constants
        for function, operands in self._calls:
            done.append(function(*operands(done)))
        return Present(done, self._where)


def taking(indices: tuple[int, ...]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that gives what a list has in these places."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return operator.itemgetter(*(slice(index, index + 1) for index in indices or (0,)))
