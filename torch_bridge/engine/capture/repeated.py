"""Operations on CPU tensors, run again before each replay.

An optimizer reads the step count of each parameter, one after the other. Among reads that follow
each other, a tensor that is read twice is read once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import pytree


@dataclasses.dataclass(frozen=True)
class Ref:
    """A tensor computed by an earlier operation.

    Attributes:
        number: of the operation.
    """

    number: int


class Repeated:
    """Operations in the order in which they are run.

    Args:
        ops: `(func, args, kwargs)`.
        results: what they gave; replaced in each run.

    Attributes:
        count: how many there are.
    """

    def __init__(self, ops: Sequence[tuple[Any, Any, Any]], results: list[Any]):
        """Find the reads that follow each other."""
        self.count = len(ops)
        self._ops = list(ops)
        self._results = results
        self._refers = [_has_ref((args, kwargs)) for _, args, kwargs in ops]
        runs = itertools.groupby(range(len(ops)), lambda number: _is_read(ops[number]))
        self._runs = [(reads, list(numbers)) for reads, numbers in runs]
        self._read: dict[int, tuple[list[Any], list[int]]] = {}
        for reads, numbers in self._runs:
            if reads:
                marks = [ops[number][1][0] for number in numbers]
                keys = [mark if isinstance(mark, Ref) else id(mark) for mark in marks]
                found = dict(zip(keys, marks, strict=True))
                places = {key: place for place, key in enumerate(found)}
                self._read[numbers[0]] = (list(found.values()), [places[key] for key in keys])

    def run(self) -> None:
        """Run them on the tensors' present values."""
        for reads, numbers in self._runs:
            if reads:
                self._results[numbers[0] : numbers[-1] + 1] = self._read_together(numbers)
            else:
                for number in numbers:
                    self._run_one(number)

    def _run_one(self, number: int) -> None:
        func, args, kwargs = self._ops[number]
        if self._refers[number]:
            args, kwargs = pytree.tree_map(self._real, (args, kwargs))
        self._results[number] = func(*args, **kwargs)

    def _read_together(self, numbers: list[int]) -> list[Any]:
        """What several reads give."""
        marks, places = self._read[numbers[0]]
        values = [self._real(mark).item() for mark in marks]
        return [values[place] for place in places]

    def _real(self, leaf: Any) -> Any:
        return self._results[leaf.number] if isinstance(leaf, Ref) else leaf


def _is_read(op: tuple[Any, Any, Any]) -> bool:
    func, args, kwargs = op
    return func is torch.ops.aten._local_scalar_dense.default and len(args) == 1 and not kwargs


def _has_ref(args: Any) -> bool:
    return any(isinstance(leaf, Ref) for leaf in pytree.tree_leaves(args))
