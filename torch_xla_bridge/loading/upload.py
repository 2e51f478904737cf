"""Upload: the CPU tensors of a batch become `jax` tensors, sharded by a spec.

`Uploader.place` runs in any thread. It leaves arrays in the batch, because a tensor belongs to the
thread that uses it: `Uploader.tensors` makes the tensors there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from isoshard.core.kit import aligned_empty, metrics
from isoshard.torch_bridge.kit import (
    Aval,
    MinibatchError,
    ShardingSpec,
    Value,
    even_layout,
    lazy_tensor,
    marks,
    to_numpy,
)
from isoshard.torch_xla_bridge.session.nested import rewrite, with_items

from .splitting import Split

_UNEVEN = (
    "Its buffers stay whole along what does not divide; for the last batch of an epoch, see "
    "last_batch='drop' and 'pad'."
)
LAST_BATCH = ("keep", "drop", "pad")


@dataclasses.dataclass(frozen=True)
class TensorSlot:
    """The placeholder of a tensor in a batch."""

    index: int


class HostTensor(NamedTuple):
    """A CPU tensor of a batch, how it is to be split, and its name for messages."""

    tensor: torch.Tensor
    split: Split | None
    name: str


@dataclasses.dataclass
class UploadedTensor:
    """A tensor of a batch on its way: on the devices already, and no torch tensor yet.

    Attributes:
        array: its elements.
        aval: its shape and dtype.
        sharding: the layout of its buffers; None without a spec.
        requested: the spec's layout, where some axis does not divide and is replicated.
        error: which.
        requires_grad: as on the host.
        host_bytes: how many were sent.
    """

    array: jax.Array
    aval: Aval
    sharding: marks.Sharding | None
    requested: marks.Sharding | None
    error: str
    requires_grad: bool
    host_bytes: int


@dataclasses.dataclass
class Batch:
    """A batch on its way, or one that is to be dropped.

    Attributes:
        tree: with a `TensorSlot` in the place of each tensor.
        tensors: they, by number.
        notes: what its user should be warned of, by kind.
        uneven: why it cannot be split; it is dropped if it is the last one.
    """

    tree: Any
    tensors: Sequence[UploadedTensor]
    notes: dict[str, str]
    uneven: str = ""


class Uploader:
    """Places batches.

    Args:
        input_sharding: None, a `ShardingSpec` for each tensor of its rank, or a dictionary of specs
            (or None) by the keys of the batch.
        batchdim: the axis that counts a batch's rows.
        last_batch: what becomes of rows that the spec's shards do not divide.
        where: line of user code, for the metrics.

    Raises:
        SpecError: a spec does not fit its mesh.
        TypeError: `input_sharding` is something else.
        ValueError: `last_batch` is none of `LAST_BATCH`.
    """

    def __init__(
        self,
        input_sharding: Any = None,
        *,
        batchdim: int = 0,
        last_batch: str = "keep",
        where: str = "unknown",
    ):
        """See the class."""
        if last_batch not in LAST_BATCH:
            raise ValueError(f"last_batch is one of {', '.join(LAST_BATCH)}, not {last_batch!r}")
        mapping = isinstance(input_sharding, Mapping)
        self._sharding = dict(input_sharding) if mapping else input_sharding
        self._batchdim = batchdim
        self._last_batch = last_batch
        self._where = where
        self._splits: dict[tuple[int, int], Split] = {}
        self._input_splits: list[Split] = []
        for spec in self._sharding.values() if mapping else (input_sharding,):
            if not isinstance(spec, ShardingSpec | None):
                raise TypeError(
                    "input_sharding is a ShardingSpec(mesh, partition_spec), a dictionary of them "
                    f"by key, or None, not a {type(spec).__name__}"
                )
            if spec is not None:  # raises now if it does not fit its mesh
                self._input_splits.append(Split(spec, len(spec.partition_spec)))

    def multiple(self) -> int:
        """The number whose multiples of rows all specs split evenly."""
        return math.lcm(*(split.shards(self._batchdim) for split in self._input_splits))

    def place(self, batch: Any) -> Batch:
        """Upload a batch to the devices, and wait until it has arrived.

        Args:
            batch: tensors anywhere in lists, tuples, mappings and objects; what is no CPU tensor
                is unchanged.

        Raises:
            ValueError: specs are given by key, and the batch has none.
            KeyError: a key with tensors has no spec.
            UnevenError: this process's part of the batch is no multiple of its shards.
        """
        tree, leaves = self._flattened(batch)
        axis = self._batchdim
        splits = [leaf.split for leaf in leaves if leaf.split]
        shards = math.lcm(*(split.shards(axis) for split in splits))
        rows = sorted(
            {
                tensor.shape[axis]
                for tensor, split, _ in leaves
                if split and axis < tensor.dim() and tensor.shape[axis] % split.shards(axis)
            }
        )
        notes = _rank_note(leaves)
        if rows:
            uneven = _uneven(rows, shards)
            if self._last_batch == "drop":
                return Batch(None, [], notes, uneven)
            if self._last_batch == "keep" and any(split.minibatch for split in splits):
                raise MinibatchError(_uneven_minibatch(rows, leaves) + uneven)
        target = {n: -(-n // shards) * shards for n in rows} if self._last_batch == "pad" else {}
        placed = []
        for tensor, split, name in leaves:
            placed.append(_upload(self._padded(tensor, target), split, name))
            if placed[-1].error:
                notes.setdefault("uneven", f"{placed[-1].error}. {_UNEVEN}")
        return Batch(tree, placed, notes)

    def tensors(self, batch: Batch) -> Any:
        """The batch with tensors of the `jax` device, in the thread that will use them."""
        tensors = [self._tensor(placed) for placed in batch.tensors]
        return _rewritten(batch.tree, TensorSlot, lambda slot, _: tensors[slot.index])

    def _tensor(self, placed: UploadedTensor) -> torch.Tensor:
        metrics.record_transfer("host_to_device", placed.host_bytes, self._where)
        tensor = lazy_tensor.fresh(placed.aval, Value.of(placed.array))
        tensor.requires_grad_(placed.requires_grad)
        if placed.sharding is not None:
            marks.keep(tensor, placed.sharding, placed.requested)
        return tensor

    def _flattened(self, batch: Any) -> tuple[Any, list[HostTensor]]:
        """The batch with a `TensorSlot` for each CPU tensor, and these."""
        leaves: list[HostTensor] = []

        def flatten(tree: Any, spec: Any, name: str) -> Any:
            def take(tensor: torch.Tensor, path: str) -> Any:
                if tensor.device.type != "cpu":
                    return tensor
                leaves.append(HostTensor(tensor, self._split(spec, tensor.dim()), name + path))
                return TensorSlot(len(leaves) - 1)

            return _rewritten(tree, torch.Tensor, take)

        shardings = self._sharding
        if not isinstance(shardings, Mapping):
            return flatten(batch, shardings, "batch"), leaves
        keys = ", ".join(map(repr, shardings))
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"input_sharding has specs for the keys {keys}, and the batch is a "
                f"{type(batch).__name__} without keys; let the loader give dictionaries, or give "
                "one ShardingSpec"
            )
        items, absent = {}, []
        for key, tree in batch.items():
            before = len(leaves)
            items[key] = flatten(tree, shardings.get(key), f"batch[{key!r}]")
            if key not in shardings and len(leaves) > before:
                absent.append(repr(key))
        if absent:
            raise KeyError(
                f"input_sharding has no entry for {', '.join(absent)}; it has {keys or 'none'}. "
                "Add a ShardingSpec for each, or None for a tensor that is not sharded."
            )
        return with_items(batch, items), leaves

    def _split(self, spec: Any, rank: int) -> Split | None:
        if spec is None:
            return None
        key = (id(spec), rank)
        if key not in self._splits:
            self._splits[key] = Split(spec, rank)
        return self._splits[key]

    def _padded(self, tensor: torch.Tensor, target: Mapping[int, int]) -> torch.Tensor:
        if tensor.dim() <= self._batchdim or tensor.shape[self._batchdim] not in target:
            return tensor
        rows = tensor.shape[self._batchdim]
        return tensor.index_select(self._batchdim, torch.arange(target[rows]) % rows)


def _rank_note(leaves: list[HostTensor]) -> dict[str, str]:
    for tensor, split, _ in leaves:
        if split is not None and not split.fits:
            return {
                "rank": f"a tensor of shape {tuple(tensor.shape)} has another rank than the "
                f"input_sharding {split.spec}, so all of it goes to every device; give a "
                "dictionary of specs by key to split tensors of several ranks"
            }
    return {}


def _uneven(rows: list[int], shards: int) -> str:
    return (
        f"a batch of {' and '.join(map(str, rows))} rows does not split evenly over {shards} "
        "shards; choose a batch size that does, and last_batch='drop' or 'pad' for the last."
    )


def _uneven_minibatch(rows: list[int], leaves: list[HostTensor]) -> str:
    shapes = [tuple(tensor.shape) for tensor, *_ in leaves if {*tensor.shape} & {*rows}]
    return (
        "When minibatch is configured, the per-host batch size must be divisible by local runtime "
        f"device count. Per host input data shape: {', '.join(map(str, shapes))}; "
    )


def _upload(tensor: torch.Tensor, split: Split | None, name: str) -> UploadedTensor:
    """Copy a tensor and send the copy."""
    host = _snapshot(tensor)
    sharding, requested, error, shape = None, None, "", host.shape
    if split is not None:
        shape = split.global_shape(host.shape, name)
        sharding, error = even_layout(split.sharding, shape, name)
        requested = split.sharding if error else None
    with jax.enable_x64(True):
        if sharding is None or sharding.is_fully_addressable:
            array = jax.device_put(host, sharding, may_alias=True)
        else:
            array = jax.make_array_from_process_local_data(sharding, host, shape)
    array.block_until_ready()
    aval = Aval.contiguous(tuple(array.shape), tensor.dtype)
    return UploadedTensor(
        array, aval, sharding, requested, error, tensor.requires_grad, host.nbytes
    )


def _snapshot(tensor: torch.Tensor) -> np.ndarray:
    """The elements in memory of their own, where devices that share host memory can use it."""
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"a loader cannot upload a {tensor.layout} tensor of shape {tuple(tensor.shape)}; "
            "give tensor.to_dense()"
        )
    host = to_numpy(tensor.detach())
    physical = Aval.contiguous(tuple(tensor.shape), tensor.dtype).physical
    if host.dtype != physical:
        return lazy_tensor.narrow(host, physical, tensor.dtype)
    copied = aligned_empty(host.shape, physical)
    np.copyto(copied, host)
    return copied


def _rewritten(batch: Any, kind: type, change: Callable[[Any, str], Any]) -> Any:
    """The batch with every instance of `kind` changed; modules in it remain as they are."""
    return rewrite(batch, lambda value: isinstance(value, kind), change, opaque=(torch.nn.Module,))
