"""Reads: which bytes of a file fill which memory, in chunks.

A source is an array in a file; requests are rectangles of it with the memory to be filled.
Where a rectangle is a run of bytes and its memory too, the file is read right into the memory.
Columns are read in blocks of rows: all requests of this process that are side by side at once, and
each block is then copied to their memory. What is more than a page away from any request is not
read.

>>> memory = np.zeros((4, 2), np.float32)
>>> columns = list(reads_of(0, (4, 8), np.dtype("float32"), [((0, 2), memory)], 1 << 20))
>>> [(read.offset, read.step, read.length, read.count) for read in columns]
[(8, 32, 8, 4)]
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from .weight_errors import FileFormatError

PAGE = 4096  # bytes; a disk reads no less
SPREAD = 1 << 20  # bytes of a block that is spread over memory; larger ones leave the cache
ADVICE = 512 << 10  # bytes; Linux fetches no more for one advice than the disk takes at once
ReadRequest = tuple[
    tuple[int, ...], np.ndarray
]  # start in the source, memory of the rectangle's shape


@dataclasses.dataclass(frozen=True, eq=False)
class Read:
    """Equal runs of bytes at equal distances in a file, and where they go.

    Attributes:
        offset: of the first run.
        step: from one run to the next, bytes.
        length: of each run, bytes.
        count: of runs.
        dtype: of the elements in the file.
        targets: pairs of the elements of a run and the memory that they fill, `count` rows of it.
    """

    offset: int
    step: int
    length: int
    count: int
    dtype: np.dtype
    targets: tuple[tuple[slice, np.ndarray], ...]

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it fills."""
        return sum(memory.nbytes for _, memory in self.targets)

    @property
    def direct(self) -> bool:
        """Whether it is one run that goes right into memory."""
        if len(self.targets) != 1 or (self.count > 1 and self.step != self.length):
            return False
        [(_, memory)] = self.targets
        fills = memory.size * self.dtype.itemsize == self.count * self.length
        return fills and memory.dtype == self.dtype and memory.flags.c_contiguous

    @property
    def memory(self) -> np.ndarray:
        """The bytes that a direct read fills."""
        return self.targets[0][1].reshape(-1).view(np.uint8)

    def expect(self, file: int) -> None:
        """Advise the system that these bytes will be read, so that it prefetches them."""
        advise = getattr(os, "posix_fadvise", None)  # Linux and BSD
        if advise is None or not (self.count == 1 or self._dense):
            return
        for at in range(0, self._span, ADVICE):
            size = min(ADVICE, self._span - at)
            advise(file, self.offset + at, size, os.POSIX_FADV_WILLNEED)

    def run(self, file: int, scratch: np.ndarray) -> int:
        """Read.

        Args:
            file: a descriptor.
            scratch: bytes of this thread, at least `buffer` of them.

        Returns:
            The bytes read.

        Raises:
            FileFormatError: the file ends before.
        """
        if self.direct:
            read_into(file, self.memory, self.offset)
            return self.nbytes
        if self._dense:
            block = scratch[: self._span]
            read_into(file, block, self.offset)
            read = self._span
        else:
            block = scratch[: self.count * self.length]
            for i in range(self.count):
                row = block[i * self.length : (i + 1) * self.length]
                read_into(file, row, self.offset + i * self.step)
            read = block.nbytes
        step = self.step if self._dense else self.length
        rows = np.ndarray(
            (self.count, self.length // self.dtype.itemsize),
            self.dtype,
            buffer=block.data,
            strides=(step, self.dtype.itemsize),
        )
        for columns, memory in self.targets:
            _spread(rows[:, columns].reshape(memory.shape), memory)
        return read

    @property
    def buffer(self) -> int:
        """The bytes of scratch that `run` needs."""
        return 0 if self.direct else self._span if self._dense else self.count * self.length

    @property
    def _span(self) -> int:
        return (self.count - 1) * self.step + self.length

    @property
    def _dense(self) -> bool:
        return self.step - self.length <= PAGE


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """Direct reads that follow each other in the file: one system call fills several memories.

    Attributes:
        reads: in the order of the file, without gaps.
    """

    reads: tuple[Read, ...]
    buffer = 0

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it fills."""
        return sum(read.nbytes for read in self.reads)

    def expect(self, file: int) -> None:
        """See `Read`."""
        for read in self.reads:
            read.expect(file)

    def run(self, file: int, scratch: np.ndarray) -> int:
        """See `Read`."""
        targets = [read.memory for read in self.reads]
        count = os.preadv(file, [target.data for target in targets], self.reads[0].offset)
        for read, target in zip(self.reads, targets, strict=True):
            if count < target.nbytes:  # the system gave less, or the file has ended
                read_into(file, target[max(count, 0) :], read.offset + max(count, 0))
            count -= target.nbytes
        return self.nbytes


def joined(reads: Iterable[Read], chunk: int) -> Iterator[Read | Run]:
    """Join direct reads that follow each other, up to `chunk` bytes and 64 of them."""
    group: list[Read] = []
    for read in reads:
        size = sum(member.nbytes for member in group)
        follows = group and group[-1].offset + group[-1].nbytes == read.offset
        if group and not (
            read.direct and follows and len(group) < 64 and size + read.nbytes <= chunk
        ):
            yield group[0] if len(group) == 1 else Run(tuple(group))
            group = []
        if read.direct:
            group.append(read)
        else:
            yield read
    if group:
        yield group[0] if len(group) == 1 else Run(tuple(group))


def read_into(file: int, memory: np.ndarray, offset: int) -> None:
    """Fill memory with the bytes of a file from `offset` on; FileFormatError if it ends before."""
    done = 0
    while done < memory.nbytes:
        count = os.preadv(file, [memory[done:].data], offset + done)
        if not count:
            raise FileFormatError(
                f"the file ends at byte {offset + done}, and {memory.nbytes - done} more were "
                "expected: it was truncated after its header was read"
            )
        done += count


def reads_of(
    offset: int,
    shape: tuple[int, ...],
    dtype: np.dtype,
    requests: Sequence[ReadRequest],
    chunk: int,
) -> Iterator[Read]:
    """The reads that fulfil requests for one array.

    Args:
        offset: of its first byte in the file.
        shape: of the array.
        dtype: of its elements.
        requests: rectangles of it, none empty.
        chunk: the most bytes to be read at once; no less than an element.

    Yields:
        The reads, in the order of the file.
    """
    if not shape:
        shape, requests = (1,), [((0,), memory.reshape(1)) for _, memory in requests]
    inner = shape[1:]
    row = math.prod(inner) * dtype.itemsize
    ends = sorted({end for (at, *_), m in requests for end in (at, at + m.shape[0])})
    for low, high in itertools.pairwise(ends):
        active = [
            ((0, *start[1:]), memory[low - start[0] : high - start[0]])
            for start, memory in requests
            if start[0] <= low and start[0] + memory.shape[0] >= high
        ]
        if not active:
            continue
        if all(_is_run(memory.shape[1:], inner) for _, memory in active):
            for runs in _nearby_runs(active, inner, dtype.itemsize):
                yield from _rows(offset + low * row, row, high - low, dtype, runs, chunk)
        else:
            for i in range(high - low):
                below = [(start[1:], memory[i]) for start, memory in active]
                yield from reads_of(offset + (low + i) * row, inner, dtype, below, chunk)


def _is_run(sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a rectangle of a row is one run of its elements."""
    partial = [axis for axis in range(len(shape)) if sizes[axis] != shape[axis]]
    return not partial or all(size == 1 for size in sizes[: partial[-1]])


def _nearby_runs(
    requests: Sequence[ReadRequest], inner: tuple[int, ...], itemsize: int
) -> Iterator[list[tuple[int, int, np.ndarray]]]:
    """Requests as runs of a row (start, end, memory), grouped if at most a page is between them."""
    steps = [math.prod(inner[i + 1 :]) for i in range(len(inner))]
    runs = []
    for start, memory in requests:
        at = sum(s * step for s, step in zip(start[1:], steps, strict=True))
        runs.append((at, at + math.prod(memory.shape[1:]), memory))
    runs.sort(key=lambda run: run[:2])
    group = [runs[0]]
    for run in runs[1:]:
        if (run[0] - max(end for _, end, _ in group)) * itemsize > PAGE:
            yield group
            group = []
        group.append(run)
    yield group


def _rows(
    offset: int,
    step: int,
    count: int,
    dtype: np.dtype,
    runs: Sequence[tuple[int, int, np.ndarray]],
    chunk: int,
) -> Iterator[Read]:
    """Reads of blocks of rows; a row longer than a chunk is split."""
    low, high = min(run[0] for run in runs), max(run[1] for run in runs)
    item = dtype.itemsize
    length = (high - low) * item
    if length > chunk:
        yield from _long_rows(offset, step, count, dtype, runs, chunk)
        return
    taken = step if step - length <= PAGE else length
    [memory, *others] = [run[2] for run in runs]
    if others or memory.dtype != dtype or not memory.flags.c_contiguous:
        chunk = min(chunk, SPREAD)  # copied on to memory while it is in the cache
    block = max(chunk // max(taken, 1), 1)
    for first in range(0, count, block):
        rows = min(block, count - first)
        targets = tuple((slice(a - low, b - low), m[first : first + rows]) for a, b, m in runs)
        yield Read(offset + first * step + low * item, step, length, rows, dtype, targets)


def _long_rows(
    offset: int,
    step: int,
    count: int,
    dtype: np.dtype,
    runs: Sequence[tuple[int, int, np.ndarray]],
    chunk: int,
) -> Iterator[Read]:
    """Reads of rows longer than a chunk: each run by itself, row by row, split where needed."""
    item = dtype.itemsize
    for i in range(count):
        for low, high, memory in runs:
            target = memory[i]
            at = offset + i * step + low * item
            if (high - low) * item > chunk:
                request = [((0,) * target.ndim, target)]
                yield from reads_of(at, target.shape, dtype, request, chunk)
            else:
                length = (high - low) * item
                run_target = (slice(0, high - low), memory[i : i + 1])
                yield Read(at, length, length, 1, dtype, (run_target,))


def _spread(rows: np.ndarray, memory: np.ndarray) -> None:
    """Copy a block to its memory; 64-bit integers may become 32-bit ones, if they fit."""
    if memory.dtype.itemsize < rows.dtype.itemsize and memory.dtype.kind in "iu" and rows.size:
        limits = np.iinfo(memory.dtype)
        low, high = int(rows.min()), int(rows.max())
        if low < limits.min or high > limits.max:
            raise OverflowError(f"values {low}..{high} do not fit {memory.dtype}")
    np.copyto(memory, rows, casting="unsafe")
