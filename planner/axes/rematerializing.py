"""What XLA's compiler for GPUs computes again where more than its limit is alive.

It goes through the kernels in their order (`HloRematerialization`, one instruction at a time).
Where more than the limit is alive, it drops a value that is not read there, and makes it again
before it or its operands are read next; until that is enough, or nothing helps any more. First
comes what nobody has read yet, which only moves; then what frees most. Operands that were gone
already are kept for it, so an activation, as large as the product that it is made of, is worth
nothing unless the product is there as well.

Never made again are products, convolutions and collectives (calls of libraries, or split in a start
and an end), results, and what loops read. What a loop makes inside is not either, here: XLA tries,
and to leave it out errs on the safe side. What is made where more than the limit is alive stays:
XLA moves it around what else its reader waits for (a bias in another dtype, say), and gives up what
it has moved twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from .fused_kernels import FusedKernel
from .local_program import LocalProgram


def computed_again(
    program: LocalProgram,
    order: Sequence[FusedKernel],
    fixed: set[int],
    limit: int,
    within: Mapping[int, int],
) -> list[FusedKernel]:
    """The order with what is computed again so that no more than a limit is alive.

    Args:
        program: of one device; values that are made again are added to it.
        order: in which kernels run.
        fixed: values that have memory of their own all along.
        limit: bytes that may be alive beside those.
        within: by the `id` of a loop the bytes that it needs for what runs inside.
    """
    return _Rematerialization(program, order, fixed, limit).ordered(within)


@dataclasses.dataclass(slots=True, eq=False)
class _Run:
    """One run of a kernel: whether it may not be made again, and whether it has moved away."""

    kernel: FusedKernel
    stays: bool = False
    moved: bool = False


class _Rematerialization:
    def __init__(
        self, program: LocalProgram, order: Sequence[FusedKernel], fixed: set[int], limit: int
    ) -> None:
        self.program = program
        self.fixed = fixed
        self.limit = limit
        self.runs = [_Run(one) for one in order]
        self.kept = fixed.union(*(one.reads for one in order if one.op.bodies))
        self.unread: dict[int, list[_Run]] = {}
        """Of each value the runs to come that read it."""
        for run in self.runs:
            for one in run.kernel.reads:
                self.unread.setdefault(one, []).append(run)
        self.maker: dict[int, _Run] = {}
        self.read: set[int] = set()
        self.alive: set[int] = set()
        self.open: dict[_Run, None] = {}
        """Runs that may be repeated, the earliest first."""
        self.now = 0

    def ordered(self, within: Mapping[int, int]) -> list[FusedKernel]:
        """The kernels with what is computed again."""
        place = 0
        while place < len(self.runs):
            run = self.runs[place]
            place += 1
            if run.moved:
                continue
            self._begin(run)
            inside = within.get(id(run.kernel), 0)
            while self.now + inside > self.limit and (best := self._best(run)) is not None:
                self._again(best, place)
            if self.now + inside > self.limit:
                run.stays = True
                self.open.pop(run, None)
            self._end(run)
        return [one.kernel for one in self.runs if not one.moved]

    def _begin(self, run: _Run) -> None:
        for one in run.kernel.writes:
            self.maker[one] = run
            self._revive(one)
        for one in run.kernel.reads:
            self.unread[one].remove(run)
            self.read.add(one)

    def _end(self, run: _Run) -> None:
        for one in (*run.kernel.reads, *run.kernel.writes):
            if not self.unread.get(one):
                self._free(one)

    def _revive(self, value: int) -> None:
        if value not in self.fixed and value not in self.alive:
            self.alive.add(value)
            self.now += self.program.bytes[value]
            run = self.maker[value]
            if not run.stays and run.kernel.is_fusion and self.kept.isdisjoint(run.kernel.writes):
                self.open[run] = None

    def _free(self, value: int) -> None:
        if value in self.alive:
            self.alive.remove(value)
            self.now -= self.program.bytes[value]

    def _best(self, now: _Run) -> _Run | None:
        """What to compute again while a kernel runs."""
        used = {*now.kernel.reads, *now.kernel.writes}
        best, most = None, (False, 0)
        for run in list(self.open):
            kernel = run.kernel
            if self.alive.isdisjoint(kernel.writes):
                del self.open[run]
                continue
            if not used.isdisjoint(kernel.writes):
                continue
            saved = self._saved(kernel)
            if saved <= 0:
                del self.open[run]
                continue
            found = self.read.isdisjoint(kernel.writes), saved
            if found > most:
                best, most = run, found
        return best

    def _saved(self, kernel: FusedKernel) -> int:
        """Bytes that are free if a kernel's results are made again later."""
        bytes_ = self.program.bytes
        kept = [one for one in kernel.reads if one not in self.alive and one not in self.fixed]
        return sum([bytes_[one] for one in kernel.writes if one in self.alive]) - sum(
            [bytes_[one] for one in kept]
        )

    def _again(self, run: _Run, start: int) -> None:
        """Make the results of a run again, before whoever comes that reads them or its operands."""
        kernel = run.kernel
        new = {one: self.program.copy(one) for one in kernel.writes}
        again = _Run(dataclasses.replace(kernel, writes=tuple(new.values())))
        before = {id(one) for value in kernel.reads for one in self.unread[value]}
        for old, copy in new.items():
            self.unread[copy], self.unread[old] = self.unread.get(old, []), []
            for reader in self.unread[copy]:
                reads = [new.get(one, one) for one in reader.kernel.reads]
                reader.kernel = dataclasses.replace(reader.kernel, reads=tuple(reads))
                before.add(id(reader))
            self._free(old)
        for one in kernel.reads:
            self._revive(one)
            self.unread[one].append(again)
        if self.read.isdisjoint(kernel.writes):
            again.stays = run.moved = True
        place = next(n for n in range(start, len(self.runs)) if id(self.runs[n]) in before)
        self.runs.insert(place, again)
