"""Operators that torch's CPU kernels compute, where no program of XLA can.

Their results are replicated over the mesh of their arguments:

>>> from isoshard import P, make_mesh, shard
>>> import torch, isoshard.torch_bridge
>>> t = shard(torch.tensor([0.0, 1.0, 0.0, 2.0]), make_mesh((4,), ("x",)), P("x"))
>>> t[t > 0].tolist(), t.nonzero().placements
([1.0, 2.0], (Replicate(),))
"""

from __future__ import annotations

from typing import Any

import torch

from isoshard.core.runtime import metrics
from isoshard.torch_bridge._torch_internals import OpOverload
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.metas import Meta, map_leaves
from isoshard.torch_bridge.engine.values.value import Aval

from . import dispatch, reading


def on_host(func: OpOverload) -> dispatch.Handler:
    """A handler that computes an operator whose result's shape depends on values on the CPU.

    XLA programs have static shapes, so the tape is executed, torch's CPU kernel runs, and the
    result goes back, replicated over the first argument's mesh. Counted as `fallbacks`.
    """

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        metrics.count("fallbacks")
        metrics.count(f"fallbacks.{func.name()}")

        layouts: list[int] = []

        def down(leaf: Any) -> Any:
            if not isinstance(leaf, lazy_tensor.LazyTensor):
                return leaf
            host = _with_strides(leaf)
            layouts.append(leaf._storage.value.layout)
            return host

        outputs = func(
            *(map_leaves(down, arg) for arg in args),
            **{name: map_leaves(down, value) for name, value in kwargs.items() if name != "device"},
        )
        replicated = _replicated_on_mesh(layouts)
        return map_leaves(
            lambda leaf: upload(leaf, replicated) if isinstance(leaf, torch.Tensor) else leaf,
            outputs,
        )

    return handler


def _with_strides(tensor: lazy_tensor.LazyTensor) -> torch.Tensor:
    """A copy on the CPU in the tensor's memory order, which some results take over."""
    host, meta = reading.to_host(tensor), tensor._aval.meta
    if meta.is_contiguous:
        return host
    first = tuple(slice(1) if step == 0 else slice(None) for step in meta.stride)
    order = torch.empty_like(meta.tensor()[first], device="cpu")
    return order.copy_(host[first]).expand(meta.size)


def _replicated_on_mesh(layouts: list[int]) -> int:
    """The replicated layout over the first mesh among some layouts."""
    for layout_id in layouts:
        if sharding_ids.users_mesh(layout_id) is not None:
            replicated = sharding_ids.replicated_like(layout_id)
            return sharding_ids.restated_on(replicated, sharding_ids.typed_mesh(layout_id))
    return sharding_ids.UNPLACED


def upload(tensor: torch.Tensor, layout: int = sharding_ids.UNPLACED) -> lazy_tensor.LazyTensor:
    """A CPU tensor's snapshot as a `jax` tensor, placed when first needed, in a layout if given."""
    aval = Aval.of(Meta.of(torch.empty_like(tensor, device="meta")))  # torch's own memory order
    value = lazy_tensor.host_value(tensor)
    value.layout = layout
    return lazy_tensor.fresh(aval, value)
