"""Upload: the CPU tensors of a batch become placed `jax` tensors, split as a spec says.

`Uploader.place` runs in any thread. It leaves arrays in the batch, because a tensor belongs to the
thread that uses it: `Uploader.tensors` makes the tensors there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch

from isoshard.core.runtime import metrics
from isoshard.core.transfer.exchange import aligned_empty
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values.value import Aval, Value
from isoshard.torch_bridge.exchange import to_numpy
from isoshard.torch_bridge.layout import marks
from isoshard.torch_bridge.nested import rewrite, with_items
from isoshard.torch_bridge.spmd import ShardingSpec
from isoshard.torch_bridge.spmd.mark_errors import MinibatchError

from .splitting import Split, Where

_UNEVEN = (
    "Its buffers stay whole along what does not divide; for the last batch of an epoch, see "
    "last_batch='drop' and 'pad'."
)
LAST_BATCH = ("keep", "drop", "pad")


@dataclasses.dataclass
class UploadedTensor:
    """A tensor of a batch on its way: on the devices already, and no torch tensor yet."""

    array: jax.Array
    aval: Aval
    where: Where | None
    requires_grad: bool
    host_bytes: int


@dataclasses.dataclass
class Batch:
    """A batch on its way, or one that is to be dropped.

    Attributes:
        tree: with a `UploadedTensor` in the place of each tensor.
        notes: what its user should be warned of, by kind.
        uneven: why it cannot be split; it is dropped if it is the last one.
    """

    tree: Any
    notes: dict[str, str]
    uneven: str = ""


@dataclasses.dataclass
class _SpecTarget:
    """What one spec is for: a whole batch, or what it has under one key."""

    key: Any
    path: str
    tree: Any
    spec: Any


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
            raise ValueError(f"last_batch is one of {', '.join(LAST_BATCH)}; given: {last_batch!r}")
        mapping = isinstance(input_sharding, Mapping)
        self._sharding = dict(input_sharding) if mapping else input_sharding
        self._batchdim = batchdim
        self._last_batch = last_batch
        self._where = where
        self._splits: dict[tuple[int, int], Split] = {}
        for spec in self._specs():
            _check_spec(spec)
            Split(spec, len(spec.partition_spec))  # a spec that does not fit its mesh is told now

    def _specs(self) -> list[Any]:
        given = self._sharding
        found = given.values() if isinstance(given, Mapping) else (given,)
        return [spec for spec in found if spec is not None]

    def multiple(self) -> int:
        """What the rows of a batch must be a multiple of, to be split evenly."""
        splits = [Split(spec, len(spec.partition_spec)) for spec in self._specs()]
        return math.lcm(*(split.parts(self._batchdim) for split in splits))

    def place(self, batch: Any) -> Batch:
        """Bring a batch to the devices, and wait until it is there.

        Args:
            batch: tensors anywhere in lists, tuples, mappings and objects; what is no CPU tensor
                stays as it is.

        Raises:
            ValueError: specs are given by key, and the batch has none.
            KeyError: a key with tensors has no spec.
            UnevenError: this process's part of the batch is no multiple of its shards.
        """
        parts = self._parts(batch)
        leaves = [leaf for part in parts for leaf in self._leaves(part)]
        rows = {
            tensor.shape[self._batchdim]
            for tensor, split in leaves
            if split is not None and not split.divides(tensor, self._batchdim)
        }
        splits = [split for _, split in leaves if split is not None]
        shards = math.lcm(*(split.parts(self._batchdim) for split in splits))
        notes = _rank_note(leaves)
        if rows:
            uneven = _uneven(sorted(rows), shards)
            if self._last_batch == "drop":
                return Batch(None, notes, uneven)
            if self._last_batch == "keep" and any(split.minibatch for split in splits):
                raise MinibatchError(_uneven_minibatch(sorted(rows), leaves) + uneven)
        target = {n: -(-n // shards) * shards for n in rows} if self._last_batch == "pad" else {}

        def change(part: _SpecTarget) -> Any:
            def place(tensor: torch.Tensor, path: str) -> Any:
                if tensor.device.type != "cpu":
                    return tensor
                padded, split = self._padded(tensor, target), self._split(part.spec, tensor.dim())
                placed = _place(padded, split, f"batch{part.path}{path}")
                if placed.where is not None and placed.where.asked is not None:
                    notes.setdefault("uneven", f"{placed.where.fault}. {_UNEVEN}")
                return placed

            return _rewritten(part.tree, torch.Tensor, place)

        if not isinstance(self._sharding, Mapping):
            return Batch(change(parts[0]), notes)
        return Batch(with_items(batch, {part.key: change(part) for part in parts}), notes)

    def tensors(self, batch: Batch) -> Any:
        """The batch with tensors of the `jax` device, in the thread that will use them."""
        return _rewritten(batch.tree, UploadedTensor, lambda placed, _: self._tensor(placed))

    def _tensor(self, placed: UploadedTensor) -> torch.Tensor:
        metrics.record_transfer("host_to_device", placed.host_bytes, self._where)
        tensor = lazy_tensor.fresh(placed.aval, Value.of(placed.array))
        tensor.requires_grad_(placed.requires_grad)
        if placed.where is not None:
            marks.keep(tensor, placed.where.sharding, placed.where.asked)
        return tensor

    def _parts(self, batch: Any) -> list[_SpecTarget]:
        """The batch, or what it has under each key, with the spec for it."""
        if not isinstance(self._sharding, Mapping):
            return [_SpecTarget(None, "", batch, self._sharding)]
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"input_sharding has specs for the keys {', '.join(map(repr, self._sharding))}, "
                f"and the batch is a {type(batch).__name__} without keys; let the loader give "
                "dictionaries, or give one ShardingSpec"
            )
        parts = [
            _SpecTarget(key, f"[{key!r}]", part, self._sharding.get(key))
            for key, part in batch.items()
        ]
        absent = [p.key for p in parts if p.key not in self._sharding and self._leaves(p)]
        if absent:
            raise KeyError(
                f"input_sharding has no entry for {', '.join(map(repr, absent))}; it has "
                f"{', '.join(map(repr, self._sharding)) or 'none'}. Add a ShardingSpec for each, "
                "or None for what stays whole."
            )
        return parts

    def _leaves(self, part: _SpecTarget) -> list[tuple[torch.Tensor, Split | None]]:
        found: list[tuple[torch.Tensor, Split | None]] = []

        def note(tensor: torch.Tensor, _: str) -> torch.Tensor:
            if tensor.device.type == "cpu":
                found.append((tensor, self._split(part.spec, tensor.dim())))
            return tensor

        _rewritten(part.tree, torch.Tensor, note)
        return found

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


def _rank_note(leaves: list[tuple[torch.Tensor, Split | None]]) -> dict[str, str]:
    for tensor, split in leaves:
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


def _uneven_minibatch(rows: list[int], leaves: list[tuple[torch.Tensor, Split | None]]) -> str:
    shapes = [tuple(tensor.shape) for tensor, _ in leaves if {*tensor.shape} & {*rows}]
    return (
        "When minibatch is configured, the per-host batch size must be divisible by local runtime "
        f"device count. Per host input data shape: {', '.join(map(str, shapes))}; "
    )


def _check_spec(spec: Any) -> None:
    if not isinstance(spec, ShardingSpec):
        raise TypeError(
            "input_sharding is a ShardingSpec(mesh, partition_spec), a dictionary of them by key, "
            f"or None; given: {type(spec).__name__}"
        )


def _place(tensor: torch.Tensor, split: Split | None, name: str) -> UploadedTensor:
    """Copy a tensor and send the copy."""
    host = _snapshot(tensor)
    where = None if split is None else split.over(host.shape, name)
    with jax.enable_x64(True):
        if where is None:
            array = jax.device_put(host, may_alias=True)
        elif where.sharding.is_fully_addressable:
            array = jax.device_put(host, where.sharding, may_alias=True)
        else:
            array = jax.make_array_from_process_local_data(where.sharding, host, where.shape)
    array.block_until_ready()
    aval = Aval.contiguous(tuple(array.shape), tensor.dtype)
    return UploadedTensor(array, aval, where, tensor.requires_grad, host.nbytes)


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
    mine = aligned_empty(host.shape, physical)
    np.copyto(mine, host)
    return mine


def _rewritten(batch: Any, kind: type, change: Callable[[Any, str], Any]) -> Any:
    """The batch with every instance of `kind` changed; modules in it are left alone."""
    return rewrite(batch, lambda value: isinstance(value, kind), change, whole=(torch.nn.Module,))
