"""Preliminary shardings, until a plan is found: of `auto_policy`, and of FSDPv2 in automatic mode.

A search does not change the marks of the user. Marks of a rule or of an earlier search are recorded
here, so that a later search may change them.

>>> import isoshard.torch_bridge as xs
>>> weight = torch.ones(8, 8, device="jax")
>>> _ = mark_for_now(weight, xs.get_1d_mesh("x"), ("x", None))
>>> user_sharding(weight), user_sharding(xs.mark_sharding(torch.ones(8).to("jax"), xs.get_1d_mesh("x"), ("x",)))
(None, NamedSharding(mesh=Mesh('x': 8, axis_types=(Auto,)), spec=P('x',), memory_kind=device))
"""  # noqa: E501

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from isoshard.core.layout.spec import SpecLike
from isoshard.torch_bridge.common.argument_types import MeshLike
from isoshard.torch_bridge.engine.values.value import Storage
from isoshard.torch_bridge.layout import marks
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .marking import mark_sharding
from .mesh import Mesh, mesh_from

_PRELIMINARY: weakref.WeakKeyDictionary[Storage, marks.Sharding] = weakref.WeakKeyDictionary()
_REQUESTED: weakref.WeakKeyDictionary[torch.nn.Module, Mesh] = weakref.WeakKeyDictionary()


def mark_for_now(
    tensor: torch.Tensor, mesh: MeshLike, partition_spec: SpecLike
) -> XLAShardedTensor:
    """Mark a tensor as `mark_sharding` does, until a plan is found for the step that uses it.

    Args:
        tensor: on the `jax` device.
        mesh: the mesh.
        partition_spec: as for `mark_sharding`.

    Raises:
        SpecError, ShardingError: as `mark_sharding`.
    """
    marked = mark_sharding(tensor, mesh, partition_spec)
    note_for_now(marked)
    return marked


def note_for_now(tensor: XLAShardedTensor) -> None:
    """Record the sharding of a marked tensor as preliminary: a search may change it."""
    present = marks.placed(tensor)
    if present is not None:
        _PRELIMINARY[tensor._storage] = present


def user_sharding(tensor: torch.Tensor) -> marks.Sharding | None:
    """The sharding that the user marked a tensor with; None without a mark."""
    if not isinstance(tensor, XLAShardedTensor) or marks.marked(tensor) is None:
        return None
    present = marks.placed(tensor)
    return None if _PRELIMINARY.get(tensor._storage) == present else present


def request_plan(module: torch.nn.Module, mesh: MeshLike) -> None:
    """Request a plan for a module, from the first compiled step that uses it."""
    _REQUESTED[module] = mesh_from(mesh)


def any_plan_requested() -> bool:
    """Whether a plan was requested, for any module that still exists."""
    return bool(_REQUESTED)


def requested_mesh(modules: Iterable[torch.nn.Module]) -> Mesh | None:
    """The mesh of the first of some modules that a plan was requested for, or None."""
    return next((_REQUESTED[module] for module in modules if module in _REQUESTED), None)
