"""A save planner of `torch.distributed.checkpoint` for tensors on meshes: every shard once.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
>>> weight = xs.mark_sharding(torch.arange(8.0).to("jax"), mesh, ("y",))
>>> planner = SPMDSavePlanner()
>>> planner.set_up_planner({"model": {"weight": weight}, "epoch": 3})
>>> [(item.index.fqn, item.index.offset) for item in planner.create_local_plan().items[:3]]
[('epoch', None), ('model.weight', torch.Size([0])), ('model.weight', torch.Size([2]))]
"""

from __future__ import annotations

import dataclasses
import io
import threading
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from isoshard.core.layout.valid_elements import ShardElements
from isoshard.torch_bridge._torch_internals.checkpoint_types import (
    STATE_DICT_TYPE,
    MetadataIndex,
    WriteItemType,
)
from isoshard.torch_bridge.engine.operators import reading
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.execution import runtime

from .flat_state_dicts import flatten, map_values
from .tensor_shards import HostShards, StoredShard, host, is_sharded, on_host, shard_at, shards_of


@dataclasses.dataclass(frozen=True)
class Pickled:
    """A value that is no tensor, as it was when a snapshot was taken."""

    data: bytes


class SPMDSavePlanner(DefaultSavePlanner):
    """Plans a save of a state dict with tensors on the `jax` device.

    It takes nested state dicts of tensors on any device and of other values, which are pickled, and
    serves `torch.distributed.checkpoint.save` and `save_state_dict`. A sharded tensor is written as
    its distinct shards, which may be of unequal sizes, each from one device and without a gather.
    The checkpoint is one that any planner reads, whatever the layout there.

    Attributes:
        sharded_state_dict: the values that are written as shards, by flat name.
        unsharded_state_dict: all other values, by flat name.
    """

    sharded_state_dict: dict[str, Any]
    unsharded_state_dict: dict[str, Any]

    def __init__(self) -> None:
        """See the class."""
        super().__init__()
        self._lock = threading.Lock()
        self._reading: dict[str, tuple[Any, set[torch.Size]]] = {}

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Set the state dict; executes recorded operations.

        Args:
            state_dict: nested.
            storage_meta: not used.
            is_coordinator: whether this process makes the global plan.

        Raises:
            ValueError: two values have the same flat name.
            CaptureError: a step is being captured.
        """
        flat, self.mappings = flatten(state_dict)
        _execute(flat)
        self.sharded_state_dict = {
            name: value
            for name, value in flat.items()
            if isinstance(value, HostShards)
            or (isinstance(value, lazy_tensor.LazyTensor) and is_sharded(value))
        }
        self.unsharded_state_dict = {
            name: value for name, value in flat.items() if name not in self.sharded_state_dict
        }
        self.state_dict = self.unsharded_state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """One item per distinct shard of a sharded tensor, and one per other value."""
        plan = super().create_local_plan()
        items = [
            item for name, value in self.sharded_state_dict.items() for item in _items(name, value)
        ]
        self.plan = dataclasses.replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value of a write item; of a sharded tensor the shard, on the host.

        Args:
            index: name and offsets.
        """
        value = self.sharded_state_dict.get(index.fqn)
        if value is None:
            value = super().lookup_object(index)
        if isinstance(value, HostShards):
            return next(s.data for s in value.shards if s.chunk.offsets == index.offset)
        if isinstance(value, lazy_tensor.LazyTensor):
            return host(self._shard(value, index), value.dtype)
        return value

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """A value that is no tensor becomes a pickle.

        Args:
            write_item: the item.
            object: what `lookup_object` gave.
        """
        if isinstance(object, Pickled):
            return io.BytesIO(object.data)
        return super().transform_object(write_item, object)

    def _shard(self, tensor: lazy_tensor.LazyTensor, index: MetadataIndex) -> ShardElements:
        """The buffer of a shard. Its array is cached until the last shard was read.

        The array of a view is computed; one that is cached for longer could not be donated.
        """
        offsets = torch.Size(index.offset or [0] * tensor.dim())
        with self._lock:
            cached = self._reading.pop(index.fqn, None)
            if cached is None:
                waiting = {shard.chunk.offsets for shard in shards_of(tensor)}
                cached = (reading.stored_array(tensor), waiting)
            array, waiting = cached
            waiting.discard(offsets)
            if waiting:
                self._reading[index.fqn] = cached
        return shard_at(array, offsets)


def snapshot(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    """Copy every value of a state dict to the host, sharded tensors as shards.

    Later changes of the tensors, and donation of their buffers, are not seen. The result serves
    `SPMDSavePlanner` in place of the state dict.

    Returns:
        `HostShards` for sharded tensors, CPU tensors for others, pickles for other values.
    """
    _execute(flatten(state_dict)[0])
    return map_values(_copied, state_dict)


def sharded_cpu_state_dict(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    """Copy every tensor of a state dict to the host, sharded tensors as shards.

    Returns:
        As `snapshot`, but values that are no tensors stay as they are.
    """
    _execute(flatten(state_dict)[0])
    return map_values(lambda v: _copied(v) if isinstance(v, torch.Tensor) else v, state_dict)


def _execute(flat: dict[str, Any]) -> None:
    if any(isinstance(value, lazy_tensor.LazyTensor) for value in flat.values()):
        recorder().refuse("a checkpoint")
        runtime.sync()


def _copied(value: Any) -> Any:
    if isinstance(value, lazy_tensor.LazyTensor):
        return on_host(value)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, HostShards | Pickled):
        return value
    file = io.BytesIO()
    torch.save(value, file)
    return Pickled(file.getvalue())


def _items(name: str, value: Any) -> list[WriteItem]:
    if isinstance(value, HostShards):
        shards = [StoredShard(shard.chunk, shard.index) for shard in value.shards]
        properties = value.properties
    else:
        shards = shards_of(value)
        properties = TensorProperties(dtype=value.dtype, requires_grad=value.requires_grad)
    return [
        WriteItem(
            index=MetadataIndex(name, shard.chunk.offsets, shard.index),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=shard.chunk, properties=properties, size=value.size()
            ),
        )
        for shard in shards
    ]
