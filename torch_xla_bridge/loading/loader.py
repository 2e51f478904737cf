"""Loaders that read, split and upload batches in the background, under torch_xla's names.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (8,), ("data",))
>>> batches = [torch.arange(16.0).reshape(8, 2), torch.ones(8, 2)]
>>> loader = MpDeviceLoader(batches, "jax", input_sharding=xs.ShardingSpec(mesh, ("data", None)))
>>> [(batch.sum().item(), batch.sharding_spec) for batch in loader]
[(120.0, '{devices=[8,1]0,1,2,3,4,5,6,7}'), (16.0, '{devices=[8,1]0,1,2,3,4,5,6,7}')]

One thread reads the CPU loader, others copy its batches to the devices, each shard to its own; both
run while the training step does, and wait when they are far enough ahead. The batches are placed
arrays then, so that the step has nothing left to move. They come in the order of the CPU loader,
whatever the number of threads. An error in a thread is raised by `next`, in the place of the batch
that it spoiled. The threads end with the epoch, with `close`, and when the iterator is dropped (by
`break`, for instance). A `DataLoader` with worker processes should start them without a fork, which
JAX warns of: `multiprocessing_context="forkserver"`.

Layouts, `input_sharding`: a `ShardingSpec` splits the tensors of its rank, and those of another
rank go whole to every device, with a warning; a dictionary has a spec or None for each key of the
batch. With `minibatch=True` in the spec, each process gives only its part of the batch.

Rows that do not divide, `last_batch`: "keep" lays such a batch replicated, with an
`UnevenWarning` (with `minibatch` it is an error). "drop" leaves out the last batch, and only that.
"pad" repeats the rows of the batch, from its first on, until they divide: means are then slightly
off, so do not evaluate with it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import torch

from isoshard.core.kit import END, DeviceError, Feed, OrderedQueue, UnevenError, metrics
from isoshard.torch_bridge.kit import UnevenWarning, naming, program, runtime

from .upload import Batch, Uploader


class PerDeviceQueue:
    """Where the batches of one device wait.

    Args:
        device: whose batches they are.
        loader_prefetch_size: batches that may wait on the host.
        device_prefetch_size: batches that may wait on the devices.

    Attributes:
        cpu_loader_queue: the batches that were read.
        queue: the batches that were uploaded.
    """

    def __init__(self, device: Any, loader_prefetch_size: int, device_prefetch_size: int):
        """See the class."""
        self.device = device
        self.cpu_loader_queue = OrderedQueue(loader_prefetch_size)
        self.queue = OrderedQueue(device_prefetch_size)


class PerDeviceLoader:
    """An iterator over uploaded batches, which executes recorded operations in between.

    Args:
        loader: reads and uploads.
        device: the `jax` device.
    """

    def __init__(self, loader: ParallelLoader, device: Any):
        """See the class."""
        self._loader = loader
        self._device = _checked(device)
        self._since_sync = 0

    def __iter__(self) -> PerDeviceLoader:
        """Itself."""
        return self

    def __len__(self) -> int:
        """Batches of one epoch."""
        return self._loader.per_device_samples()

    def next(self) -> Any:
        """Execute what was recorded, on every `batches_per_execution`-th call, and take a batch.

        Raises:
            StopIteration: there are no more, or the loader was closed.
            Exception: what the CPU loader, or the upload, raised for this batch.
        """
        if self._since_sync >= self._loader.batches_per_execution - 1:
            self._since_sync = 0
            runtime.sync()
        else:
            self._since_sync += 1
        batch = self._loader._take()
        if batch is END:
            runtime.sync()
            raise StopIteration
        return batch

    __next__ = next


class ParallelLoader:
    """Reads a CPU loader once, in the background, and uploads its batches.

    Args:
        cpu_loader: any iterable of batches, a `torch.utils.data.DataLoader` for instance. A batch
            is a tensor, or tensors anywhere in lists, tuples, mappings and objects; what is no CPU
            tensor is passed on as it is.
        devices: the `jax` device, in a list. A mesh is one device.
        batchdim: the axis that counts a batch's rows.
        batches_per_execution: batches that one program may use; recorded operations are executed
            after so many.
        loader_prefetch_size: batches that wait on the host, at most.
        device_prefetch_size: batches that wait on the devices, at most.
        host_to_device_transfer_threads: threads that upload.
        input_sharding: None, a `ShardingSpec`, or a dictionary of them; see the module.
        last_batch: "keep", "drop" or "pad" what does not divide; see the module.

    Raises:
        DeviceError: `devices` is not the one device.
        SpecError: `input_sharding` does not fit its mesh.
        TypeError: `cpu_loader` is not iterable, or `input_sharding` no such thing.
        ValueError: a number is below 1 (`batchdim` below 0), or `last_batch` is unknown.
    """

    def __init__(
        self,
        cpu_loader: Iterable[Any],
        devices: Sequence[Any],
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int = 16,
        device_prefetch_size: int = 8,
        host_to_device_transfer_threads: int = 1,
        input_sharding: Any = None,
        *,
        last_batch: str = "keep",
    ):
        """See the class; reading begins now."""
        if len(devices) != 1:
            raise DeviceError(
                f"a loader takes one device, which is the full mesh, not {len(devices)}: "
                f"{list(devices)}. Pass [torch_xla.device()], and split batches with "
                "input_sharding."
            )
        self._device = _checked(devices[0])
        for name, value, least in (
            ("batchdim", batchdim, 0),
            ("batches_per_execution", batches_per_execution, 1),
            ("loader_prefetch_size", loader_prefetch_size, 1),
            ("device_prefetch_size", device_prefetch_size, 1),
            ("host_to_device_transfer_threads", host_to_device_transfer_threads, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is at least {least}, not {value}")
        self._cpu_loader = cpu_loader
        self._batches_per_execution = batches_per_execution
        self._uploader = Uploader(
            input_sharding,
            batchdim=batchdim,
            last_batch=last_batch,
            where=metrics.user_location(),
        )
        self._drops = last_batch == "drop"
        self._warned: set[str] = set()
        queue = PerDeviceQueue(self._device, loader_prefetch_size, device_prefetch_size)
        self._feed = Feed(
            _synced(iter(cpu_loader)),
            queue.queue,
            read=queue.cpu_loader_queue,
            prepare=jax.profiler.annotate_function(self._uploader.place, "isoshard.loading.upload"),
            threads=host_to_device_transfer_threads,
            name="isoshard loader",
        )
        weakref.finalize(self, self._feed.stop).atexit = False

    def per_device_loader(self, device: Any) -> PerDeviceLoader:
        """The iterator over the batches.

        Args:
            device: the `jax` device.
        """
        return PerDeviceLoader(self, device)

    def per_device_samples(self) -> int:
        """Batches of one epoch, as the CPU loader counts them.

        A last batch that will be dropped is not counted, if the CPU loader is a `DataLoader` with a
        batch size, which tells.
        """
        return _length(self._cpu_loader, self._uploader.multiple() if self._drops else 1)

    def next_item(self, device: Any) -> Any:
        """The next batch, or None after the last one; executes nothing.

        Args:
            device: the `jax` device.

        Raises:
            Exception: what the CPU loader, or the upload, raised for this batch.
        """
        _checked(device)
        batch = self._take()
        return None if batch is END else batch

    def close(self) -> None:
        """End the threads, and wait until they have; a read in progress is finished first."""
        self._feed.close()

    @property
    def batches_per_execution(self) -> int:
        """Batches that one program may use."""
        return self._batches_per_execution

    def send_cpu_data_to_device(self, batches: Sequence[Any], device: Any) -> list[Any]:
        """Upload batches at once, in this thread.

        Args:
            batches: as the CPU loader gives them.
            device: the `jax` device.

        Returns:
            A batch of `jax` tensors for each.

        Raises:
            UnevenError: a batch does not divide, and is to be dropped.
        """
        _checked(device)
        placed = [self._uploader.place(batch) for batch in batches]
        for batch in placed:
            if batch.uneven:
                raise UnevenError(batch.uneven)
        return [self._uploader.tensors(batch) for batch in placed]

    def _take(self) -> Any:
        batch: Batch = self._feed.take()
        if batch is END:
            return END
        if batch.uneven:
            if self._feed.take() is END:
                return END
            self.close()
            raise UnevenError(f"{batch.uneven} This batch is not the last one.")
        for kind, note in batch.notes.items():
            if kind not in self._warned:
                self._warned.add(kind)
                warnings.warn(note, _CATEGORIES[kind], stacklevel=3)
        return self._uploader.tensors(batch)


class MpDeviceLoader:
    """A loader for the `jax` device: each iteration is an epoch, read in the background.

    Args:
        loader: any iterable of batches, a `torch.utils.data.DataLoader` for instance.
        device: the `jax` device.
        **kwargs: for `ParallelLoader`: `input_sharding`, `last_batch` and the others.

    Raises:
        DeviceError: `device` is another one.

    >>> for number in MpDeviceLoader([torch.tensor(1), torch.tensor(2)], "jax"):
    ...     print(number)
    tensor(1, device='jax:0')
    tensor(2, device='jax:0')
    """

    def __init__(self, loader: Iterable[Any], device: Any, **kwargs: Any):
        """See the class."""
        self._loader = loader
        self._device = _checked(device)
        self._parallel_loader_kwargs = kwargs
        self._parallel_loader: weakref.ref[ParallelLoader] | None = None
        self._feed: Feed | None = None
        self._warned: set[str] = set()

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; one that was not finished ends."""
        if self._feed is not None:
            self._feed.close(
                "a new iteration of the MpDeviceLoader has begun, which ended this one"
            )
        parallel = ParallelLoader(self._loader, [self._device], **self._parallel_loader_kwargs)
        parallel._warned = self._warned
        self._parallel_loader = weakref.ref(parallel)
        self._feed = parallel._feed
        return parallel.per_device_loader(self._device)

    def __len__(self) -> int:
        """Batches of one epoch; see `ParallelLoader.per_device_samples`."""
        options = self._parallel_loader_kwargs
        if options.get("last_batch") != "drop":
            return _length(self._loader, 1)
        uploader = Uploader(options.get("input_sharding"), batchdim=options.get("batchdim", 0))
        return _length(self._loader, uploader.multiple())


_CATEGORIES = {"rank": UserWarning, "uneven": UnevenWarning}


def _checked(device: Any) -> torch.device:
    """The device, if it is ours."""
    checked = torch.device(device)
    if checked.type not in naming.OURS or checked.index not in (None, 0):
        raise DeviceError(
            f"a loader uploads to {naming.current()}, not to {checked}; pass "
            f"{naming.current()}, and split batches over its mesh with input_sharding"
        )
    return naming.current()


def _synced(source: Iterator[Any]) -> Iterator[Any]:
    """The batches of a loader, without a computation that is still to run."""
    while True:
        with jax.profiler.TraceAnnotation("isoshard.loading.read"):
            batch = next(source, END)
        program.sync()  # a source may compute on the device; the tape is this thread's
        if batch is END:
            return
        yield batch
        del batch  # or it would be kept for as long as the next one is read


def _length(loader: Any, multiple: int) -> int:
    """Batches of a loader, without a last one that is no multiple."""
    count = len(loader)
    size, sampler = getattr(loader, "batch_size", None), getattr(loader, "sampler", None)
    if multiple == 1 or not size or sampler is None or loader.drop_last or not count:
        return count
    try:
        rows = len(sampler)
    except TypeError:  # of an iterable dataset, whose length nobody knows
        return count
    return count - 1 if (rows % size) % multiple else count
