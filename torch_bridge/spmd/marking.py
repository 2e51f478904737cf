"""`mark_sharding`: tensors sharded over a mesh by a mark.

A model written for one device is sharded by marking a few of its tensors; XLA's partitioner
completes the rest.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (4, 2), ("x", "y"))
>>> linear = torch.nn.Linear(32, 10).to("jax")
>>> _ = xs.mark_sharding(linear.weight, mesh, (1, 0))
>>> linear.weight.sharding_spec
'{devices=[2,4]0,2,4,6,1,3,5,7}'

Source: the RFC "XLAShardedTensor and mark_sharding" of PyTorch/XLA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import torch

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.blocks.chunk_sizes import SizesLike
from isoshard.core.errors import SpecError
from isoshard.core.layout.mesh import as_mesh
from isoshard.core.layout.spec import SpecLike, named_sharding, same_layout
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import MeshLike
from isoshard.torch_bridge.common.wrapper_tensors import inner_tensors, is_wrapper
from isoshard.torch_bridge.engine.compiling import input_placement
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.layout import graph_calls, marks
from isoshard.torch_bridge.layout.inner_specs import inner_sharding
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .mark_errors import MarkSpecError, UnmarkableError
from .mesh import Mesh
from .uneven import even_with_warning


def mark_sharding(
    t: torch.Tensor, mesh: MeshLike, partition_spec: SpecLike, *, sizes: SizesLike = None
) -> XLAShardedTensor:
    """Mark a tensor with its sharding over a mesh.

    The mark is valid at once and for the life of the tensor's memory; data moves with the next
    execution. In a step being recorded it is a constraint for XLA's partitioner.

    A value that is still to be computed, and a view, may be marked several times: the last mark
    counts. Data may be marked again after a mark that splits nothing. An axis that does not divide
    is replicated, with a warning, see `uneven`.

    Args:
        t: a tensor, parameter or activation on the `jax` device. Of one that is made of others
            (a quantized weight), those are marked with the part of the spec that fits them.
        mesh: an `xs.Mesh`, or a `jax.sharding.Mesh`.
        partition_spec: one entry per axis of `t`: an axis index or name of the mesh, None, or a
            tuple of those (first is outermost); also a PartitionSpec.
        sizes: the elements of each block, where one axis is split; or per axis None or that; or
            "chunk", as `torch.chunk` does. The shards are then of unequal sizes, without a warning.

    Returns:
        `t` itself.

    Raises:
        SpecError: an entry is no axis of the mesh, an axis is used twice, or the ranks differ.
        UnevenError: the sizes do not add up to the axis, or are not one for each block.
        ShardingError: `t` is on another device, or is data that another mark splits already.

    Example:
        >>> import isoshard.torch_bridge as xs
        >>> mesh = xs.Mesh(range(8), (4, 2), ("x", "y"))
        >>> w = xs.mark_sharding(torch.ones(8, 6, device="jax"), mesh, ("x", None))
        >>> w.partition_spec, w.local_shards[0].data.shape
        (P('x',), torch.Size([2, 6]))
    """
    if is_wrapper(t) and sizes is None:
        layout, shape = layout_for(tuple(t.shape), mesh, partition_spec), tuple(t.shape)
        for inner in inner_tensors(t).values():
            fitting = inner_sharding(layout, shape, tuple(inner.shape))
            mark_sharding(inner, fitting.mesh, fitting.spec)
        return cast(XLAShardedTensor, t)
    t, sharding = checked(t, mesh, partition_spec, "mark_sharding")
    if graph_calls.is_traced(t):
        graph_calls.mark_or_trace(mark_sharding, t, mesh, partition_spec)
        return t
    if sizes is not None:
        sizes = None if isinstance(sizes, str) and sizes == "chunk" else sizes
        layout = BlockLayout.plan(tuple(t.shape), sharding.mesh, sharding, sizes)
        _check_free(t, sharding)
        marks.annotate(t, layout)
        return t
    present = marks.marked(t)
    if present is None or not _same(present, sharding, t.dim()):
        _check_free(t, sharding)
        even, requested = even_with_warning(sharding, t.shape)
        marks.annotate(t, even, requested=requested)
    if naming.is_torch_xla():
        _note_for_torch_xla(t, mesh, partition_spec)
    return t


def _note_for_torch_xla(t: XLAShardedTensor, mesh: Any, partition_spec: Any) -> None:
    """Count the mark, store its spec as written, and send host memory to the devices."""
    metrics.count("marks")
    if marks.is_on_host(t) and recorder().capture is None:
        input_placement.settle([t._storage.value])
    if isinstance(partition_spec, tuple):
        marks.note_written(t, partition_spec)
        if isinstance(mesh, Mesh):
            mesh.get_op_sharding(partition_spec)


def _check_free(t: XLAShardedTensor, sharding: jax.sharding.NamedSharding) -> None:
    present = marks.marked(t)
    if present is not None and _splits(present, t.dim()) and not marks.is_recorded(t):
        raise UnmarkableError(
            f"a tensor of shape {tuple(t.shape)} is marked {present.spec} already and cannot be "
            f"marked {sharding.spec} as well; call clear_sharding(t) first, or isoshard.reshard"
        )


def annotate_custom_sharding(
    t: torch.Tensor, mesh: MeshLike, partition_spec: SpecLike
) -> XLAShardedTensor:
    """Mark a tensor with its sharding from here on, whatever its mark before.

    In the program it is one more constraint after the sharding of the data; the data
    themselves move when the program ends.

    Args:
        t: on the `jax` device.
        mesh: an `xs.Mesh`, or a `jax.sharding.Mesh`; it may be another than that of
            the first mark, over the same devices in the same order.
        partition_spec: as for `mark_sharding`.

    Returns:
        `t` itself.

    Raises:
        SpecError: an entry is no axis of the mesh, an axis is used twice, or the ranks differ.
        ShardingError: `t` is on another device.
    """
    t, sharding = checked(t, mesh, partition_spec, "annotate_custom_sharding")
    even, requested = even_with_warning(sharding, t.shape)
    marks.constrain_in_place(t, even, requested)
    return t


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Remove a tensor's mark: it becomes replicated over its mesh.

    Args:
        t: on the `jax` device; a tensor on another is not changed.

    Returns:
        `t` itself.

    Example:
        >>> import isoshard.torch_bridge as xs
        >>> w = xs.mark_sharding(torch.ones(8, device="jax"), xs.get_1d_mesh("x"), ("x",))
        >>> w.partition_spec, xs.clear_sharding(w).partition_spec
        (P('x',), None)
    """
    if isinstance(t, XLAShardedTensor):
        marks.clear(t)
    return t


def checked(
    t: torch.Tensor, mesh: MeshLike, partition_spec: SpecLike, verb: str
) -> tuple[XLAShardedTensor, jax.sharding.NamedSharding]:
    """Check the arguments of a function, and resolve its spec to a sharding.

    Args:
        t: must be on the `jax` device.
        mesh: the mesh.
        partition_spec: must have one entry per axis of `t`, if it is a sequence.
        verb: the function, for messages.

    Raises:
        SpecError, ShardingError: as `mark_sharding`.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(
            f"{verb} takes the tensor first, then the mesh, then the spec: {verb}(t, mesh, spec); "
            f"the first argument is {type(t).__name__}"
        )
    if not isinstance(t, XLAShardedTensor) and not graph_calls.is_traced(t):
        name = naming.current().type
        raise UnmarkableError(
            f"{verb} takes a tensor on the {name} device, and this one of shape "
            f"{tuple(t.shape)} is on {t.device}. Move it with t.to({name!r}) (a module with "
            f"module.to({name!r})), or use isoshard.shard(t, mesh, spec), which does both."
        )
    return cast(XLAShardedTensor, t), layout_for(tuple(t.shape), mesh, partition_spec)


def layout_for(
    shape: tuple[int, ...], mesh: MeshLike, partition_spec: SpecLike
) -> jax.sharding.NamedSharding:
    """The sharding of a spec for a shape; its axes need not divide.

    Raises:
        SpecError: as `mark_sharding`.
    """
    if isinstance(partition_spec, Sequence) and not isinstance(
        partition_spec, str | jax.sharding.PartitionSpec
    ):
        if len(partition_spec) != len(shape):
            raise MarkSpecError(
                f"spec {tuple(partition_spec)} has {len(partition_spec)} entries for a tensor of "
                f"rank {len(shape)} (shape {shape}); give one entry per axis, None for an "
                "axis that is not split"
            )
    try:
        return named_sharding(partition_spec, as_mesh(mesh), len(shape))
    except SpecError as error:
        raise MarkSpecError(*error.args) from None


def _splits(sharding: jax.sharding.NamedSharding, ndim: int) -> bool:
    return marks.sharding_type(sharding, ndim) != marks.ShardingType.REPLICATED


def _same(a: jax.sharding.NamedSharding, b: jax.sharding.NamedSharding, ndim: int) -> bool:
    return a.mesh.axis_sizes == b.mesh.axis_sizes and same_layout(a, b, ndim)
