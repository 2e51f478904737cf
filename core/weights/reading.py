"""Reading: threads that fill the memory of arrays, and arrays as soon as theirs is full."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from isoshard.core.errors import CopyError
from isoshard.core.runtime import metrics
from isoshard.core.transfer.host_memory import aligned_empty, start_of

from .file_format import Stored
from .reads import Read, ReadRequest, Run, joined, reads_of
from .weight_errors import FileFormatError

Blocks = dict[tuple[int, ...], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Job:
    """An array to be read.

    Attributes:
        name: what it is called.
        shape: of the global array.
        dtype: of its elements on devices.
        sharding: its layout.
        open: returns memory for the blocks of this process by their start, and for each tensor
            of the files the requests that fill it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    open: Callable[[NamedSharding], tuple[Blocks, Mapping[Stored, Sequence[ReadRequest]]]]

    @property
    def nbytes(self) -> int:
        """The bytes of its distinct blocks on devices of this process."""
        indices = self.sharding.addressable_devices_indices_map(self.shape).values()
        count = len({start_of(index) for index in indices})
        return count * math.prod(self.sharding.shard_shape(self.shape)) * self.dtype.itemsize


def read_all(
    jobs: Sequence[Job], threads: int, chunk: int, report: Callable[[int], None]
) -> dict[str, jax.Array]:
    """Read all jobs, in order.

    Args:
        jobs: what is to be read.
        threads: how many read at the same time.
        chunk: the most bytes that each has in flight.
        report: called with the bytes of each read.

    Raises:
        FileFormatError: a file ends before it should.
        CopyError: 64-bit integers do not fit 32 bits.
        OSError: a file cannot be read.
    """
    arrays: dict[str, jax.Array] = {}
    waiting: collections.deque[tuple[Job, Blocks, list[concurrent.futures.Future[None]]]]
    waiting = collections.deque()
    ahead = 0
    with _Files(chunk, report) as files, _Pool(threads) as pool:
        for job in jobs:
            blocks, reads_by_tensor = job.open(job.sharding)
            reads = []
            for stored, requests in reads_by_tensor.items():
                each = reads_of(stored.offset, stored.shape, stored.dtype, requests, chunk)
                for read in joined(each, chunk):
                    read.expect(files.open(stored.file))
                    reads.append(pool.submit(files.read, job.name, stored.file, read))
            waiting.append((job, blocks, reads))
            ahead += job.nbytes
            while len(waiting) > 1 and (ahead > 2 * threads * chunk or _all_done(waiting[0][2])):
                ahead -= waiting[0][0].nbytes
                _finish(waiting.popleft(), arrays)
        while waiting:
            _finish(waiting.popleft(), arrays)
    return arrays


def _all_done(reads: Sequence[concurrent.futures.Future[None]]) -> bool:
    return all(read.done() for read in reads)


def _finish(entry: Any, arrays: dict[str, jax.Array]) -> None:
    """Wait until the memory of an array is filled, and create the array."""
    job, blocks, reads = entry
    for read in reads:
        read.result()
    if blocks:
        array = jax.make_array_from_callback(
            job.shape, job.sharding, lambda index: blocks[start_of(index)], dtype=job.dtype
        )
    else:  # no device of this process has a shard
        array = jax.make_array_from_single_device_arrays(
            job.shape, job.sharding, [], dtype=job.dtype
        )
    if not _on_cpu(job.sharding):
        array.block_until_ready()  # the memory is used no more, and can go
        size = sum(block.nbytes for block in blocks.values())
        metrics.count("transfers.host_to_device", len(blocks))
        metrics.count("transfers.host_to_device_bytes", size)
    arrays[job.name] = array


def _on_cpu(sharding: NamedSharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


class _Pool(concurrent.futures.ThreadPoolExecutor):
    """Threads; an error cancels what has not begun."""

    def __exit__(self, *error: Any) -> None:
        self.shutdown(wait=True, cancel_futures=error[0] is not None)


class _Files:
    """Open files and each thread's scratch memory."""

    def __init__(self, chunk: int, report: Callable[[int], None]):
        self._chunk, self._report = chunk, report
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._own = threading.local()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: Any) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def open(self, file: Path) -> int:
        """The descriptor of a file, opened once."""
        with self._lock:
            if file not in self._open:
                self._open[file] = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            return self._open[file]

    def read(self, name: str, file: Path, read: Read | Run) -> None:
        """Do one read."""
        descriptor = self.open(file)
        scratch = getattr(self._own, "scratch", None)
        if read.buffer and (scratch is None or scratch.nbytes < read.buffer):
            scratch = self._own.scratch = aligned_empty((max(self._chunk, read.buffer),), np.uint8)
        try:
            size = read.run(descriptor, scratch if scratch is not None else _NOTHING)
        except FileFormatError as error:
            raise FileFormatError(f"{file}: {name}: {error}") from None
        except OverflowError as error:
            raise CopyError(
                f"{name}: {error}, as jax_enable_x64 is off. Call "
                "jax.config.update('jax_enable_x64', True) first."
            ) from None
        with self._lock:
            metrics.count("file_reads")
            metrics.count("file_bytes_read", size)
        self._report(read.nbytes)


_NOTHING = np.empty(0, np.uint8)
