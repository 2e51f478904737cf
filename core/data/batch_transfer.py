"""Transfer of batches from host memory to devices.

>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.mesh import make_mesh
>>> placer = Placer(make_mesh((8,), ("data",)), P("data"))
>>> [placed] = placer.run([{"x": np.ones((8, 2), np.float32)}])
>>> placed.as_arrays()["x"].sharding.shard_shape((8, 2))
(1, 2)

`run` may be driven by another thread than the one that uses the batches: it does not communicate
with other processes. `compare` and `compare_end` do, so they belong in the thread that runs the
program, where the order of messages is the same in all processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from isoshard.core.errors import ShardingError, raise_collected
from isoshard.core.frameworks import Framework, framework_of
from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.layout.spec import named_sharding
from isoshard.core.processes import assert_equal
from isoshard.core.runtime import metrics
from isoshard.core.transfer.array_like import from_literal, is_literal
from isoshard.core.transfer.device_dtypes import device_dtype
from isoshard.core.transfer.leaf_specs import NamedArray, named_arrays
from isoshard.core.transfer.process_local import from_local, global_shape

from .batch_lengths import FILL, pad_lengths
from .batch_rows import BatchRows, assign_specs, uneven_error
from .ordered_queue import END

_END_TIMEOUT = 600.0
"""Seconds to wait for another process at a comparison: a slow reader may be minutes late."""


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceBatch:
    """A batch on the devices.

    Attributes:
        arrays: its arrays.
        hosts: the host values, with their dtypes.
        structure: of the batch.
        mask: the key of the mask, if there is one, and the mask.
    """

    arrays: list[jax.Array]
    hosts: list[Any]
    structure: Any
    mask: tuple[str, jax.Array] | None = None

    def as_arrays(self) -> Any:
        """The batch with its `jax.Array`s."""
        return self._batch(self.arrays, lambda mask: mask)

    def as_framework(self, framework: Framework) -> Any:
        """The batch with arrays of a framework, with their host dtypes."""
        arrays = [
            framework.from_jax(array, like=host)
            for array, host in zip(self.arrays, self.hosts, strict=True)
        ]
        return self._batch(arrays, framework.from_jax)

    def _batch(self, arrays: list[Any], convert: Any) -> Any:
        batch = jax.tree.unflatten(self.structure, arrays)
        return batch if self.mask is None else {**batch, self.mask[0]: convert(self.mask[1])}


@dataclasses.dataclass(eq=False)
class Placer:
    """Puts the batches of one epoch on devices; see `loader` for the options.

    Attributes:
        mesh: the target mesh.
        spec: one for all, a tree of them, or a Plan.
        last: "error", "drop" or "pad".
        mask: the key of the mask of padded rows.
        lengths: to which sequences are padded, ascending; empty if they are not.
        fill: the arrays of sequences, and what they are padded with.
        local: whether this process passes only its local data.
        copy: as for `shard`.
        exact: whether 64-bit floats raise where JAX has none, instead of being rounded.
        name: of a batch, for messages.
        where: the line of user code to which transfers are attributed.
        closed: set by the consumer; nothing is compared with other processes afterwards.
    """

    mesh: Mesh
    spec: Any
    last: str = "error"
    mask: str | None = None
    lengths: tuple[int, ...] = ()
    fill: Mapping[str, Any] = dataclasses.field(default_factory=lambda: FILL)
    local: bool = False
    copy: bool | None = True
    exact: bool = False
    name: str = "batch"
    where: str = "unknown"
    closed: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        """Find the processes that own devices of the mesh."""
        owners = sorted({device.process_index for device in self.mesh.devices.flat})
        is_shared = len(owners) > 1 and jax.process_index() in owners
        self._owners = owners if is_shared else []
        self._agreed: set[Any] = set()

    def run(self, source: Iterable[Any]) -> Generator[DeviceBatch, None, None]:
        """Put each batch of a source on the devices.

        Yields:
            The batches on the devices.

        Raises:
            ShardingError: a batch cannot be sharded; all errors at once.
            TypeError: a leaf of a batch is no array.
        """
        rows = BatchRows(self.mesh, local=self.local)
        batches = iter(source)
        while (batch := _next(batches)) is not END:
            leaves, structure = self._leaves(batch)
            uneven = [] if self.last == "pad" else rows.uneven(leaves)
            if uneven and self.last == "drop":
                if _next(batches) is not END:
                    raise uneven_error(uneven, "It is not the last one. ")
                metrics.count("data.dropped_rows", uneven[0][1])
                return
            if uneven:
                raise uneven_error(uneven)
            with jax.profiler.TraceAnnotation("isoshard.data.place"):
                placed = self._placed(leaves, structure, rows, batch)
            del batch, leaves  # else it would remain alive during the wait for the next batch
            yield placed
            del placed

    def compare(self, placed: DeviceBatch) -> None:
        """Have the processes compare the shapes, dtypes and specs of their arrays, if new.

        Args:
            placed: the batch.

        Raises:
            DistributedError: they differ.
        """
        types = [
            (a.shape, str(a.dtype), str(cast(NamedSharding, a.sharding).spec)) for a in _all(placed)
        ]
        if self._owners and not self._agreed.issuperset(types):
            assert_equal(f"the arrays of a {self.name}", types, self._owners, timeout=_END_TIMEOUT)
            self._agreed.update(types)

    def compare_end(self, count: int) -> None:
        """Have the processes compare their numbers of batches.

        Raises:
            DistributedError: they differ.
        """
        if self._owners and not self.closed:
            assert_equal("the number of batches", count, self._owners, timeout=_END_TIMEOUT)

    def _leaves(self, batch: Any) -> tuple[list[NamedArray], Any]:
        """The leaves of a batch in host memory, each with its spec."""
        leaves, structure = named_arrays(_in_memory(batch, self.name), self.name)
        if self.mask is not None and not isinstance(batch, dict):
            raise TypeError(
                f"{self.name}: mask={self.mask!r} is a key of the batch, and the batch is a "
                f"{type(batch).__name__}; let the source give dictionaries, or leave mask out"
            )
        if self.mask is not None and self.mask in batch:
            raise ShardingError(
                f"{self.name}: it already has an entry {self.mask!r}; pass another mask"
            )
        if self.lengths:
            pad_lengths(leaves, self.lengths, self.fill, self.name)
        assign_specs(leaves, structure, self.mesh, self.spec, self.name)
        return leaves, structure

    def _placed(
        self, leaves: list[NamedArray], structure: Any, rows: BatchRows, batch: Any
    ) -> DeviceBatch:
        real = rows.pad(leaves) if self.last == "pad" else 0
        arrays = self._put(leaves)
        if self.mask is None:
            return DeviceBatch(arrays, [leaf.value for leaf in leaves], structure)
        mask = self._put([rows.mask(leaves, real, self.mask)])[0]
        return DeviceBatch(arrays, [leaf.value for leaf in leaves], structure, (self.mask, mask))

    def _put(self, leaves: list[NamedArray]) -> list[jax.Array]:
        arrays, errors, size = [], [], 0
        for leaf in leaves:
            try:
                arrays.append(self._put_leaf(leaf))
                size += leaf.value.nbytes if isinstance(leaf.value, np.ndarray) else 0
            except ShardingError as error:
                errors.append(error)
        raise_collected(errors)
        metrics.record_transfer("host_to_device", size, self.where)
        return arrays

    def _put_leaf(self, leaf: NamedArray) -> jax.Array:
        if self.exact and isinstance(leaf.value, np.ndarray):
            device_dtype(leaf.value.dtype, leaf.name)
        if not self.local:
            return leaf.put(self.mesh, self.copy)
        rank = np.ndim(leaf.value)
        sharding = named_sharding(leaf.spec, self.mesh, rank, name=leaf.name)
        shape = global_shape(leaf.value.shape, sharding)
        return from_local(
            leaf.value, self.mesh, leaf.spec, shape=shape, copy=self.copy, name=leaf.name
        )


def _next(batches: Iterator[Any]) -> Any:
    with jax.profiler.TraceAnnotation("isoshard.data.read"):
        return next(batches, END)


def _in_memory(batch: Any, name: str) -> Any:
    """The batch with NumPy and JAX arrays for leaves."""
    batch = from_literal(batch) if is_literal(batch) else batch
    wrong = []

    def as_array(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | jax.Array):
            return leaf
        if isinstance(leaf, bool | int | float | complex | np.generic):
            return np.asarray(leaf)
        framework = framework_of(leaf)
        if framework is not None:
            return framework.to_numpy(leaf)
        if hasattr(leaf, "__array__"):
            return np.asarray(leaf)
        label = ".".join(component for component in (name, path_name(path)) if component)
        wrong.append(f"{label} is {type(leaf).__name__}")
        return leaf

    arrays = jax.tree.map_with_path(as_array, batch)
    if wrong:
        raise TypeError(
            f"a batch is a pytree of arrays and numbers: {'; '.join(wrong)}. Take such leaves out "
            "of the batches, and turn mappings of other classes into dictionaries."
        )
    return arrays


def _all(placed: DeviceBatch) -> list[jax.Array]:
    return placed.arrays if placed.mask is None else [*placed.arrays, placed.mask[1]]
