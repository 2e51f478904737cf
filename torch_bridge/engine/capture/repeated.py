"""Operations on CPU tensors, run again before each replay.

An optimizer adds one to the step count of each parameter and reads them, one after the other. These
go by memory (`step_counts.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import pytree, schema_of
from isoshard.torch_bridge.engine.operators.functionalize import written

from .step_counts import StepCounts, is_count, is_increment


@dataclasses.dataclass(frozen=True)
class Ref:
    """A tensor computed by an earlier operation.

    Attributes:
        number: of the operation.
        place: among its results, where it gives several.
    """

    number: int
    place: int | None = None


@dataclasses.dataclass
class _Run:
    """Operations of one kind that follow each other.

    Attributes:
        through_torch: runs them, whatever their tensors are.
        in_memory: runs them on the step counts that they had when they were arranged, or None.
    """

    through_torch: Callable[[], None]
    in_memory: Callable[[], None] | None = None


class Repeated:
    """Operations in the order in which they are run.

    Args:
        ops: `(func, args, kwargs)`.
        results: what they gave; replaced in each run.

    Attributes:
        count: how many there are.
    """

    def __init__(self, ops: Sequence[tuple[Any, Any, Any]], results: list[Any]):
        """See the class."""
        self.count = len(ops)
        self._ops = list(ops)
        self._results = results
        self._refers = [_has_ref((args, kwargs)) for _, args, kwargs in ops]
        self._arrange()

    def run(self) -> None:
        """Run them on the tensors' present values."""
        in_place = None
        for run in self._runs:
            if run.in_memory is None:
                run.through_torch()
                in_place = None  # it may have moved some
                continue
            in_place = self._counts.are_in_place() if in_place is None else in_place
            (run.in_memory if in_place else run.through_torch)()
        if in_place is False:
            self._arrange()

    def may_write(self, tensor: torch.Tensor) -> bool:
        """Whether an operation writes to a tensor, or to what may be a view of it."""
        targets = pytree.tree_leaves([_written(op) for op in self._ops])
        return any(one is tensor or isinstance(one, Ref) for one in targets)

    def _arrange(self) -> None:
        """Find the step counts, and the reads that follow each other."""
        taken = itertools.chain.from_iterable(_read(op) or _taken(op) for op in self._ops)
        counts = {id(one): one for one in taken if is_count(one)}
        self._counts = StepCounts(list(counts.values()))
        self._places = {key: place for place, key in enumerate(counts)}
        self._runs: list[_Run] = []
        reads = itertools.groupby(range(self.count), lambda number: bool(_read(self._ops[number])))
        for are_reads, numbers in reads:
            self._runs += [self._reads([*numbers])] if are_reads else map(self._other, numbers)

    def _reads(self, numbers: Sequence[int]) -> _Run:
        """Several reads."""
        marks = [_read(self._ops[number])[0] for number in numbers]
        where = slice(numbers[0], numbers[-1] + 1)

        def through_torch() -> None:
            self._results[where] = [self._real(mark).item() for mark in marks]

        if any(id(mark) not in self._places for mark in marks):
            return _Run(through_torch)
        read = self._counts.reading([self._places[id(mark)] for mark in marks])

        def in_memory() -> None:
            self._results[where] = read()

        return _Run(through_torch, in_memory)

    def _other(self, number: int) -> _Run:
        """An addition to step counts, or any operation."""
        through_torch = functools.partial(self._run_one, number)
        tensors, added = _added(self._ops[number])
        counted = all(
            id(one) in self._places and one is not added and is_increment(added, one)
            for one in tensors
        )
        twice = len({id(one) for one in tensors}) < len(tensors)
        if not tensors or twice or not counted or len({one.dtype for one in tensors}) > 1:
            return _Run(through_torch)
        if self._ops[number][0] is torch.ops.aten.add_.Tensor:
            self._results[number] = tensors[0]
        places = [self._places[id(one)] for one in tensors]
        if isinstance(added, torch.Tensor):
            other = self._places[id(added)]
            return _Run(through_torch, self._counts.adding_one(places, other))
        return _Run(through_torch, self._counts.adding(places, added))

    def _run_one(self, number: int) -> None:
        func, args, kwargs = self._ops[number]
        if self._refers[number]:
            args, kwargs = pytree.tree_map(self._real, (args, kwargs))
        self._results[number] = func(*args, **kwargs)

    def _real(self, leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        result = self._results[leaf.number]
        return result if leaf.place is None else result[leaf.place]


def _read(op: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    """What an operation reads, if that is all it does."""
    func, args, kwargs = op
    reads = func is torch.ops.aten._local_scalar_dense.default and len(args) == 1 and not kwargs
    return args if reads else ()


def _added(op: tuple[Any, Any, Any]) -> tuple[Sequence[Any], Any]:
    """The tensors to which an operation adds one number, and the number."""
    func, args, kwargs = op
    if kwargs.get("alpha", 1) != 1 or len(args) != 2:
        return (), None
    if func is torch.ops.aten.add_.Tensor:
        return args[:1], args[1]
    together = torch.ops.aten._foreach_add_
    return args if func in (together.Scalar, together.Tensor) else ((), None)


def _taken(op: tuple[Any, Any, Any]) -> list[Any]:
    """What an addition to step counts takes."""
    tensors, number = _added(op)
    return [*tensors, number]


def _written(op: tuple[Any, Any, Any]) -> list[Any]:
    """What an operation writes to."""
    func, args, kwargs = op
    arguments = schema_of(func).arguments
    given = dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
    return [given[name] for name in written(arguments) if name in given]


def _has_ref(args: Any) -> bool:
    return any(isinstance(leaf, Ref) for leaf in pytree.tree_leaves(args))
