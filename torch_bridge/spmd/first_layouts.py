"""Layouts that hold until a plan is found: those of `auto_policy`, and of FSDPv2 in automatic mode.

A mark is the user's word, and a search leaves it alone. What a rule or an earlier search chose is
noted here, so that a later one may choose again.

>>> import isoshard.torch_bridge as xs
>>> weight = torch.ones(8, 8, device="jax")
>>> _ = mark_for_now(weight, xs.get_1d_mesh("x"), ("x", None))
>>> said_by_user(weight), said_by_user(xs.mark_sharding(torch.ones(8).to("jax"), xs.get_1d_mesh("x"), ("x",)))
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

_FOR_NOW: weakref.WeakKeyDictionary[Storage, marks.Sharding] = weakref.WeakKeyDictionary()
_ASKED_FOR: weakref.WeakKeyDictionary[torch.nn.Module, Mesh] = weakref.WeakKeyDictionary()


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
    """Let the layout that a tensor has be one that nobody insists on.

    Args:
        tensor: marked.
    """
    present = marks.placed(tensor)
    if present is not None:
        _FOR_NOW[tensor._storage] = present


def said_by_user(tensor: torch.Tensor) -> marks.Sharding | None:
    """The layout that a user marked a tensor with; None if nobody did.

    Args:
        tensor: on any device.
    """
    if not isinstance(tensor, XLAShardedTensor) or marks.marked(tensor) is None:
        return None
    present = marks.placed(tensor)
    return None if _FOR_NOW.get(tensor._storage) == present else present


def ask_for_plan(module: torch.nn.Module, mesh: MeshLike) -> None:
    """Let the first compiled step that uses a module find a layout for it.

    Args:
        module: with the parameters.
        mesh: that the plan is for.
    """
    _ASKED_FOR[module] = mesh_from(mesh)


def any_asked_for() -> bool:
    """Whether a plan was asked for, for any module that still exists."""
    return bool(_ASKED_FOR)


def mesh_asked_for(modules: Iterable[torch.nn.Module]) -> Mesh | None:
    """The mesh of the first module that a plan was asked for; None if there is none.

    Args:
        modules: to look at.
    """
    return next((_ASKED_FOR[one] for one in modules if one in _ASKED_FOR), None)
