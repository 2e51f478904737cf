"""`context_parallel`: buffers split along their sequence inside a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch
from torch.distributed.tensor import Replicate, Shard

from isoshard.torch_bridge.common.argument_types import MeshLike
from isoshard.torch_bridge.distributed.along import require_1d_mesh, shard_in_place
from isoshard.torch_bridge.layout import marks
from isoshard.torch_bridge.layout.layout_methods import LayoutMethods


@contextlib.contextmanager
def context_parallel(
    mesh: MeshLike,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[torch.Tensor] | None = None,
) -> Iterator[None]:
    """Split buffers along their sequence, and restore their shardings at the end.

    Under torchrun the buffers become each rank's part of the sequence, and attention passes keys
    and values round. Here they stay whole, only their layout changes; XLA gathers the keys and
    values of an attention whose sequence is split, which is torch's default ("allgather") too.
    The shards are in order: work is not balanced for causal attention.

    Args:
        mesh: of one dimension.
        buffers: tensors on the `jax` device: inputs, labels, position tables.
        buffer_seq_dims: the axis of each that is the sequence.
        no_restore_buffers: those of them that keep the layout.

    Raises:
        ValueError: there are not as many axes as buffers, or one that is to keep the layout is not
            among them.

    Example:
        >>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
        >>> x = torch.ones(2, 16, device="jax")
        >>> with context_parallel(init_device_mesh("jax", (8,)), buffers=[x], buffer_seq_dims=[1]):
        ...     x.placements
        (Shard(dim=1),)
        >>> x.placements
        (Replicate(),)
    """
    dimension = require_1d_mesh(mesh, "context_parallel")
    tensors, axes = list(buffers or ()), list(buffer_seq_dims or ())
    if len(tensors) != len(axes):
        raise ValueError(
            f"context_parallel got {len(tensors)} buffers and {len(axes)} buffer_seq_dims; "
            "give one axis per buffer"
        )
    keep = {id(buffer) for buffer in no_restore_buffers or ()}
    if keep - {id(buffer) for buffer in tensors}:
        raise ValueError("no_restore_buffers must be among the buffers of context_parallel")
    before = [
        marks.requested_sharding(buffer) if isinstance(buffer, LayoutMethods) else None
        for buffer in tensors
    ]
    for buffer, axis in zip(tensors, axes, strict=True):
        shard_in_place(buffer, dimension, Shard(axis))
    try:
        yield
    finally:
        for buffer, sharding in zip(tensors, before, strict=True):
            if id(buffer) not in keep:
                shard_in_place(buffer, dimension, Replicate())
                if sharding is not None and isinstance(buffer, LayoutMethods):
                    marks.annotate(buffer, sharding)


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Do nothing: tensors here are global, so those on no mesh take part in every operation.

    Example:
        >>> import torch, isoshard.torch_bridge as xs
        >>> x = xs.mark_sharding(torch.ones(8, device="jax"), xs.get_1d_mesh("x"), ("x",))
        >>> with implicit_replication():
        ...     (x + torch.ones(8, device="jax")).sum().item()
        16.0
    """
    yield
