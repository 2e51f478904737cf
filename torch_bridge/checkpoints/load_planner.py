"""A load planner of `torch.distributed.checkpoint` for tensors on meshes.

The shardings of the checkpoint and of the tensors are independent: each shard reads its overlaps
with the saved shards, and nothing else.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from isoshard.core.errors import CheckpointError
from isoshard.torch_bridge._torch_internals.checkpoint_types import (
    STATE_DICT_TYPE,
    Metadata,
    MetadataIndex,
)
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.execution import runtime

from .arrival import Arrival
from .tensor_shards import is_sharded


class SPMDLoadPlanner(DefaultLoadPlanner):
    """Plans a load into a state dict with tensors on the `jax` device.

    It serves `torch.distributed.checkpoint.load` and `load_state_dict`. Tensors are filled in place
    and keep mark, layout and dtype; other values are replaced in the state dict. Elements go from
    the file to the shard of the device that needs them: no sharded tensor is unsharded on the host.

    >>> import tempfile, torch, isoshard.torch_bridge as xs
    >>> from torch.distributed import checkpoint as dcp
    >>> from isoshard.torch_bridge.checkpoints import SPMDSavePlanner
    >>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    >>> saved = xs.mark_sharding(torch.arange(8.0).to("jax"), mesh, ("y",))
    >>> loaded = xs.mark_sharding(torch.zeros(8).to("jax"), mesh, ("x",))
    >>> import warnings
    >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")    # torch's: one process suffices
    ...     _ = dcp.save({"t": saved}, checkpoint_id=folder, planner=SPMDSavePlanner())
    ...     dcp.load({"t": loaded}, checkpoint_id=folder, planner=SPMDLoadPlanner())
    >>> loaded
    tensor([0., 1., 2., 3., 4., 5., 6., 7.], device='jax:0', sharding=P('x',))

    Attributes:
        sharded_state_dict: the tensors that are sharded on their mesh, by flat name.
        unsharded_state_dict: all other values, by flat name.
    """

    sharded_state_dict: dict[str, Any]
    unsharded_state_dict: dict[str, Any]

    def __init__(self) -> None:
        """See the class."""
        super().__init__()
        self._arrivals: dict[str, Arrival] = {}

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Set the state dict to fill; executes recorded operations.

        Args:
            state_dict: nested.
            metadata: of the checkpoint.
            is_coordinator: whether this process makes the global plan.

        Raises:
            CaptureError: a step is being captured.
        """
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if any(isinstance(value, lazy_tensor.LazyTensor) for value in self.state_dict.values()):
            recorder().refuse("a checkpoint")
            runtime.sync()
        self.sharded_state_dict = {
            name: value
            for name, value in self.state_dict.items()
            if isinstance(value, lazy_tensor.LazyTensor) and is_sharded(value)
        }
        self.unsharded_state_dict = {
            name: value
            for name, value in self.state_dict.items()
            if name not in self.sharded_state_dict
        }

    def create_local_plan(self) -> LoadPlan:
        """For every shard of a tensor, its overlaps with the saved shards.

        Raises:
            RuntimeError: the checkpoint lacks values of the state dict, or has other shapes; all of
                them are named.
            CheckpointError: the checkpoint has only some elements of a tensor.
        """
        try:
            plan = super().create_local_plan()
        except (RuntimeError, ValueError) as error:
            errors = self._mismatches()
            if not errors:
                raise
            lines = "".join(f"\n  {error}" for error in errors)
            raise RuntimeError(
                f"the checkpoint does not fit the state dict, and nothing was loaded:{lines}"
            ) from error
        saved: dict[str, Any] = self._saved()
        self._arrivals = {
            name: Arrival(name, value)
            for name, value in self.state_dict.items()
            if isinstance(value, lazy_tensor.LazyTensor)
            and isinstance(saved.get(name), TensorStorageMetadata)
        }
        items = [item for item in plan.items if item.dest_index.fqn not in self._arrivals]
        for name, arrival in self._arrivals.items():
            reads = create_read_items_for_chunk_list(name, saved[name], arrival.chunks)
            arrival.expect(reads)
            items += reads
        return dataclasses.replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Where to put what is read: for a shard of a `jax` tensor, host memory of its size.

        Args:
            index: name and offsets.
        """
        arrival = self._arrivals.get(index.fqn)
        if arrival is None:
            return super().lookup_tensor(index)
        return arrival.buffer(index.offset or torch.Size())

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Record a completed read; the last one of a tensor replaces its elements.

        Args:
            read_item: the read.
            tensor: what `resolve_tensor` gave for it, filled.
        """
        arrival = self._arrivals.get(read_item.dest_index.fqn)
        if arrival is not None:
            arrival.commit(read_item)

    def check_complete(self) -> None:
        """Raise unless every tensor was replaced.

        Raises:
            CheckpointError: some reads were not done.
        """
        waiting = [name for name, arrival in self._arrivals.items() if not arrival.done]
        if waiting:
            raise CheckpointError(f"these tensors were not read completely: {', '.join(waiting)}")

    def _saved(self) -> dict[str, Any]:
        return self.metadata.state_dict_metadata if self.metadata is not None else {}

    def _mismatches(self) -> list[str]:
        """Error messages for what differs between the state dict and the checkpoint."""
        saved = self._saved()
        errors = []
        for name, value in self.state_dict.items():
            entry = saved.get(name)
            if entry is None:
                errors.append(f"{name}: not in the checkpoint")
            elif isinstance(entry, TensorStorageMetadata):
                if not isinstance(value, torch.Tensor):
                    errors.append(
                        f"{name}: a tensor in the checkpoint, here {type(value).__name__}"
                    )
                elif entry.size != value.size():
                    errors.append(
                        f"{name}: {tuple(entry.size)} in the checkpoint, here {tuple(value.shape)}"
                    )
        return errors
