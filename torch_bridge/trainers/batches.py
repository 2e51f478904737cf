"""Batches of a training library, split over a mesh.

>>> import isoshard as iso, isoshard.torch_bridge
>>> mesh = iso.make_mesh((2, 4), ("data", "model"))
>>> batch = {"x": torch.ones(4, 3, device="jax"), "length": 4}
>>> split_batch(batch, mesh, "data")["x"].partition_spec
P('data',)
"""

from __future__ import annotations

import math
from typing import Any

import torch

from isoshard.core.layout.mesh import as_mesh
from isoshard.core.layout.spec import axis_names, named_sharding
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.layout import marks
from isoshard.torch_bridge.spmd import mark_sharding
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor


def batch_axes(mesh: Any, axes: Any) -> tuple[str, ...]:
    """The mesh axes that split the rows of batches, checked.

    Args:
        mesh: the mesh.
        axes: an axis, or several, outermost first; None for none. "data" of a mesh without such an
            axis is none, as it is the default of the callers.

    Raises:
        SpecError: the mesh has no such axis.
    """
    jax_mesh = as_mesh(mesh)
    if axes is None or (axes == "data" and "data" not in jax_mesh.axis_names):
        return ()
    named_sharding((axes,), jax_mesh, 1, name="batches")
    return tuple(axis_names(axes))


def split_batch(batch: Any, mesh: Any, axes: Any) -> Any:
    """Split the rows of a batch's tensors over mesh axes.

    Args:
        batch: any nesting, with tensors on the `jax` device. Those that are marked already, have no
            axes, or have a number of rows that does not divide are not changed.
        mesh: the mesh.
        axes: the mesh axis, or several, outermost first; None splits nothing.
    """
    names = axis_names(axes)
    if names:
        jax_mesh = as_mesh(mesh)
        shards = math.prod(jax_mesh.shape[name] for name in names)
        for leaf in pytree.tree_leaves(batch):
            if _can_split(leaf, shards):
                mark_sharding(leaf, jax_mesh, (tuple(names), *(None,) * (leaf.dim() - 1)))
    return batch


def split_inputs(module: torch.nn.Module, mesh: Any, axes: Any) -> Any:
    """Split the rows of a module's inputs.

    Args:
        module: the module.
        mesh: see `split_batch`.
        axes: see `split_batch`.

    Returns:
        The hook; `.remove()` ends it.
    """

    def split(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        split_batch((args, kwargs), mesh, axes)
        return args, kwargs

    return module.register_forward_pre_hook(split, with_kwargs=True)


def _can_split(leaf: Any, shards: int) -> bool:
    if not isinstance(leaf, XLAShardedTensor) or isinstance(leaf, torch.nn.Parameter):
        return False
    return bool(leaf.dim()) and leaf.shape[0] % shards == 0 and marks.marked(leaf) is None
