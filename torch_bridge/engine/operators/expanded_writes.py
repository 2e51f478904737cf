"""Writes to some elements of an expanded tensor.

Elements of a broadcast share memory. torch rejects writes to one, but for `index_fill_`,
`masked_fill_` and `index_put_` it only warns. A place in memory gets a number if any of its
elements is hit; of many numbers the last, or the sum where they accumulate.

>>> import isoshard.torch_bridge
>>> base = torch.zeros(2, 1, device="jax")
>>> import warnings
>>> with warnings.catch_warnings():
...     warnings.simplefilter("ignore")
...     _ = base.expand(2, 3).index_fill_(1, torch.tensor([2], device="jax"), 5.0)
>>> base.tolist()
[[5.0], [5.0]]
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from isoshard.core.runtime.private_names import optional
from isoshard.torch_bridge._torch_internals import OpOverload
from isoshard.torch_bridge.engine.recording import lazy_tensor

from . import dispatch

aten = torch.ops.aten


def fill(name: str, target: Any, hit: Any, value: Any) -> Any:
    """Write a number to the memory of an expanded tensor.

    Args:
        name: of the operator, for the warning.
        target: an expanded `jax` tensor.
        hit: bools in its shape: which elements are written.
        value: the number, or a tensor with one element.
    """
    memory, axes = _memory(name, target)
    hit = aten.any.dims(hit, axes, True)
    if isinstance(value, torch.Tensor):
        aten.masked_fill_.Tensor(memory, hit, aten.reshape.default(value, []))
    else:
        aten.masked_fill_.Scalar(memory, hit, value)
    return target


def put(target: Any, indices: list[Any], values: Any, accumulate: bool = False) -> Any:
    """`index_put_`; arguments as there."""
    aten.index_put.default(target, indices, values, accumulate)  # for its checks
    if values.numel() == 1 and not accumulate:
        hit = aten.index_put.default(_nowhere(target), indices, _true(target))
        return fill("index_put_", target, hit, values)
    memory, axes = _memory("index_put_", target)
    if accumulate:
        zeros = aten.new_zeros.default(target, list(target.shape))
        added = aten.index_put.default(zeros, indices, values, True)
        aten.add_.Tensor(memory, aten.sum.dim_IntList(added, axes, True))
        return target
    shape = list(aten.index.Tensor(target, indices).shape)
    count = math.prod(shape)
    turns = torch.arange(count, device=target.device).reshape(shape)
    never = aten.new_full.default(turns, list(target.shape), -1)
    last = aten.amax.default(aten.index_put.default(never, indices, turns), axes, True)
    every = aten.reshape.default(aten.expand.default(values, shape), [-1])
    written = aten.take.default(every, aten.clamp.default(last, 0))
    aten.copy_.default(memory, aten.where.self(last >= 0, written, memory))
    return target


def _memory(name: str, target: Any) -> tuple[Any, list[int]]:
    """An expanded tensor's memory, with axes of one element, and these axes; after a warning."""
    warnings.warn(
        f"Use of {name} on expanded tensors is deprecated. Please clone() the tensor before "
        "performing this operation. This also applies to advanced indexing e.g. tensor[mask] = "
        "scalar",
        UserWarning,
        stacklevel=2,
    )
    memory = target
    axes = [axis for axis, step in enumerate(target.stride()) if step == 0]
    for axis in axes:
        memory = aten.slice.Tensor(memory, axis, 0, 1)
    return memory, axes


def _mask_fill(target: Any, mask: Any, value: Any) -> Any:
    return fill("masked_fill_", target, aten.expand.default(mask, list(target.shape)), value)


def _index_fill(target: Any, dim: int, index: Any, value: Any) -> Any:
    aten.index_fill(target, dim, index, value)  # for its checks
    hit = aten.index_fill.int_Scalar(_nowhere(target), dim, index, True)
    return fill("index_fill_", target, hit, value)


def _nowhere(target: Any) -> Any:
    return aten.new_zeros.default(target, list(target.shape), dtype=torch.bool)


def _true(target: Any) -> Any:
    return aten.new_ones.default(target, [], dtype=torch.bool)


def _handler(func: OpOverload, on_expanded: Any) -> dispatch.Handler:
    plain = dispatch.in_place_handler(func, ["self"])

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(args[0], lazy_tensor.LazyTensor) and args[0]._aval.expanded:
            return on_expanded(*args, **kwargs)
        return plain(args, kwargs)

    return handler


def register() -> None:
    """Put the operations into the dispatcher."""
    for overload in ("Scalar", "Tensor"):
        func = getattr(aten.masked_fill_, overload)
        dispatch.SPECIAL[func.name()] = _handler(func, _mask_fill)
        func = getattr(aten.index_fill_, f"int_{overload}")
        dispatch.SPECIAL[func.name()] = _handler(func, _index_fill)


with optional():
    register()
