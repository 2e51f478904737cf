"""Rematerialization: values that XLA's compiler for GPUs recomputes above its memory limit.

The pass visits kernels in their order. Where more than the limit is alive, it drops a value that is
not read there, and recomputes it before it or its operands are read next; until that is enough, or
nothing helps any more. First come values that have not been read yet, which only move; then those
that free most. Operands that were freed already stay alive for it, so an activation, as large as
the product that it is computed from, saves nothing unless the product is alive as well.

Products, convolutions and collectives (library calls, or split into a start and an end), results,
and values that loops read are never recomputed. Nor are values inside loops here: XLA tries, so
this overestimates. A kernel that runs where more than the limit is alive is final: XLA moves it
past whatever else its reader waits for, and gives up what it has moved twice.

Source: `HloRematerialization` of XLA's hlo_rematerialization.cc, one instruction at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Protocol

from .kernels import Inner, Kernel


class Values(Protocol):
    """Values by id, to which copies can be added."""

    bytes: list[int]

    def copy(self, value: int) -> int:
        """The id of a new value of the same size."""
        ...


def rematerialized(
    values: Values, order: Sequence[Kernel], fixed: Collection[int], limit: int, inner: Inner
) -> list[Kernel]:
    """The order with recomputed values, so that no more than a limit is alive.

    Args:
        values: of the program; recomputed ones are added.
        order: in which kernels run.
        fixed: values that have memory of their own all the time.
        limit: bytes that may be alive in addition to those.
        inner: bytes that the bodies of kernels need.
    """
    return _Rematerialization(values, order, fixed, limit).ordered(inner)


@dataclasses.dataclass(slots=True, eq=False)
class _Run:
    """One run of a kernel: whether it cannot be repeated, and whether it has moved away."""

    kernel: Kernel
    final: bool = False
    moved: bool = False


class _Rematerialization:
    def __init__(
        self, values: Values, order: Sequence[Kernel], fixed: Collection[int], limit: int
    ) -> None:
        self.values = values
        self.fixed = fixed
        self.limit = limit
        self.runs = [_Run(kernel) for kernel in order]
        self.pinned = set(fixed).union(*(kernel.reads for kernel in order if kernel.inside))
        self.unread: dict[int, list[_Run]] = {}
        """The later runs that read each value."""
        for run in self.runs:
            for value in run.kernel.reads:
                self.unread.setdefault(value, []).append(run)
        self.writer: dict[int, _Run] = {}
        self.read: set[int] = set()
        self.alive: set[int] = set()
        self.candidates: dict[_Run, None] = {}
        """Runs that may be repeated, the earliest first."""
        self.live = 0

    def ordered(self, inner: Inner) -> list[Kernel]:
        """The kernels, with recomputations."""
        index = 0
        while index < len(self.runs):
            run = self.runs[index]
            index += 1
            if run.moved:
                continue
            self._begin(run)
            inside = inner.get(id(run.kernel), 0)
            while self.live + inside > self.limit and (best := self._best(run)) is not None:
                self._repeat(best, index)
            if self.live + inside > self.limit:
                run.final = True
                self.candidates.pop(run, None)
            self._end(run)
        return [run.kernel for run in self.runs if not run.moved]

    def _begin(self, run: _Run) -> None:
        for value in run.kernel.writes:
            self.writer[value] = run
            self._revive(value)
        for value in run.kernel.reads:
            self.unread[value].remove(run)
            self.read.add(value)

    def _end(self, run: _Run) -> None:
        for value in (*run.kernel.reads, *run.kernel.writes):
            if not self.unread.get(value):
                self._free(value)

    def _revive(self, value: int) -> None:
        if value not in self.fixed and value not in self.alive:
            self.alive.add(value)
            self.live += self.values.bytes[value]
            run = self.writer[value]
            if not run.final and run.kernel.is_fusion and self.pinned.isdisjoint(run.kernel.writes):
                self.candidates[run] = None

    def _free(self, value: int) -> None:
        if value in self.alive:
            self.alive.remove(value)
            self.live -= self.values.bytes[value]

    def _best(self, current: _Run) -> _Run | None:
        """The run to repeat later while another kernel runs."""
        used = {*current.kernel.reads, *current.kernel.writes}
        best, most = None, (False, 0)
        for run in list(self.candidates):
            kernel = run.kernel
            if self.alive.isdisjoint(kernel.writes):
                del self.candidates[run]
                continue
            if not used.isdisjoint(kernel.writes):
                continue
            saved = self._saved(kernel)
            if saved <= 0:
                del self.candidates[run]
                continue
            worth = self.read.isdisjoint(kernel.writes), saved
            if worth > most:
                best, most = run, worth
        return best

    def _saved(self, kernel: Kernel) -> int:
        """Bytes that are freed if a kernel's results are recomputed later."""
        bytes_ = self.values.bytes
        freed = sum([bytes_[value] for value in kernel.writes if value in self.alive])
        return freed - sum(
            [bytes_[v] for v in kernel.reads if v not in self.alive and v not in self.fixed]
        )

    def _repeat(self, run: _Run, start: int) -> None:
        """Run a kernel again before the next that reads its results or its operands."""
        kernel = run.kernel
        new = {value: self.values.copy(value) for value in kernel.writes}
        again = _Run(dataclasses.replace(kernel, writes=tuple(new.values())))
        before = {id(reader) for value in kernel.reads for reader in self.unread[value]}
        for old, copy in new.items():
            self.unread[copy], self.unread[old] = self.unread.get(old, []), []
            for reader in self.unread[copy]:
                reads = [new.get(value, value) for value in reader.kernel.reads]
                reader.kernel = dataclasses.replace(reader.kernel, reads=tuple(reads))
                before.add(id(reader))
            self._free(old)
        for value in kernel.reads:
            self._revive(value)
            self.unread[value].append(again)
        if self.read.isdisjoint(kernel.writes):
            again.final = run.moved = True
        index = next(n for n in range(start, len(self.runs)) if id(self.runs[n]) in before)
        self.runs.insert(index, again)
