"""The view operators of torch, as chains of view operations.

Each entry of `_OPS` takes the input's shape, the meta of each result and the operator's arguments,
and returns one list of view operations per result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from isoshard.core.runtime.caches import CALLS, Recent
from isoshard.core.runtime.private_names import optional
from isoshard.torch_bridge._torch_internals import OpOverload, schema_of
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.dtypes import physical_dtype
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.signatures.shape_checks import (
    check_stride_count,
    check_written_once,
    spelled,
)
from isoshard.torch_bridge.engine.values.metas import Meta
from isoshard.torch_bridge.engine.values.value import Aval
from isoshard.torch_bridge.engine.values.views import Chain, ViewOp

from . import dispatch

Size = tuple[int, ...]


def _reshape(size: Size, outs: list[Meta], *_: Any) -> list[list[ViewOp]]:
    return [[("reshape", out.size)] for out in outs]


def _same(size: Size, outs: list[Meta], *_: Any) -> list[list[ViewOp]]:
    return [[] for _ in outs]


def _t(size: Size, outs: list[Meta]) -> list[list[ViewOp]]:
    return [[("permute", tuple(reversed(range(len(size)))))]]


def _transpose(size: Size, outs: list[Meta], a: int, b: int) -> list[list[ViewOp]]:
    order = list(range(len(size)))
    if order:
        order[a], order[b] = order[b], order[a]
    return [[("permute", tuple(order))]]


def _permute(size: Size, outs: list[Meta], dims: Any) -> list[list[ViewOp]]:
    return [[("permute", tuple(dim % max(len(size), 1) for dim in dims))]]


def _expand(size: Size, outs: list[Meta], *_: Any, **__: Any) -> list[list[ViewOp]]:
    return [[("expand", outs[0].size)]]


def _slice(
    size: Size, outs: list[Meta], dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> list[list[ViewOp]]:
    dim %= len(size)
    first, stop, _ = slice(start, end, step).indices(size[dim])
    return [[("slice", dim, first, max(first, stop), step)]]


def _select(size: Size, outs: list[Meta], dim: int, index: int) -> list[list[ViewOp]]:
    dim %= len(size)
    return [[("index", dim, index % size[dim])]]


def _unbind(size: Size, outs: list[Meta], dim: int = 0) -> list[list[ViewOp]]:
    return [[("index", dim % len(size), index)] for index in range(len(outs))]


def _split(size: Size, outs: list[Meta], _sizes: Any, dim: int = 0) -> list[list[ViewOp]]:
    dim %= len(size)
    ops: list[list[ViewOp]] = []
    first = 0
    for out in outs:
        ops.append([("slice", dim, first, first + out.size[dim], 1)])
        first += out.size[dim]
    return ops


def _diagonal(
    size: Size, outs: list[Meta], offset: int = 0, dim1: int = 0, dim2: int = 1
) -> list[list[ViewOp]]:
    return [[("diagonal", offset, dim1 % len(size), dim2 % len(size))]]


def _unfold(size: Size, outs: list[Meta], dim: int, extent: int, step: int) -> list[list[ViewOp]]:
    if not size:
        return [[("reshape", outs[0].size)]]
    return [[("unfold", dim % len(size), extent, step)]]


def _bitcast(size: Size, outs: list[Meta], dtype: torch.dtype) -> list[list[ViewOp]]:
    return [[("bitcast", outs[0].size, physical_dtype(dtype))]]


def _conj(size: Size, outs: list[Meta]) -> list[list[ViewOp]]:
    return [[("conj",)]]


def _neg(size: Size, outs: list[Meta]) -> list[list[ViewOp]]:
    return [[("neg",)]]


def _as_real(size: Size, outs: list[Meta]) -> list[list[ViewOp]]:
    return [[("as_real",)]]


def _as_complex(size: Size, outs: list[Meta]) -> list[list[ViewOp]]:
    return [[("as_complex",)]]


_OPS: dict[str, Callable[..., list[list[ViewOp]]]] = {
    "aten::view": _reshape,
    "aten::_reshape_alias": _reshape,
    "aten::unsqueeze": _reshape,
    "aten::squeeze": _reshape,
    "aten::squeeze.dim": _reshape,
    "aten::squeeze.dims": _reshape,
    "aten::alias": _same,
    "aten::detach": _same,
    "aten::lift_fresh": _same,
    "aten::t": _t,
    "aten::transpose.int": _transpose,
    "aten::permute": _permute,
    "aten::expand": _expand,
    "aten::slice.Tensor": _slice,
    "aten::select.int": _select,
    "aten::unbind.int": _unbind,
    "aten::split.Tensor": _split,
    "aten::split_with_sizes": _split,
    "aten::diagonal": _diagonal,
    "aten::unfold": _unfold,
    "aten::view.dtype": _bitcast,
    "aten::_conj": _conj,
    "aten::_neg_view": _neg,
    "aten::view_as_real": _as_real,
    "aten::view_as_complex": _as_complex,
}


def _view_handler(func: OpOverload, ops_of: Callable[..., list[list[ViewOp]]]) -> Any:
    recent: Recent[Any, Any] = Recent(CALLS, "engine: views by operator")
    result = str(schema_of(func).returns[0].type)
    many = "[]" in result or "List" in result
    dispatch.only_recorded(func)

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        rest = [tuple(arg) if type(arg) is list else arg for arg in args[1:]]
        key = (tensor._aval, tensor._chain, *rest)
        if kwargs:
            key = (*key, _hashable(tuple(kwargs.items())))
        result = recent.get(key)
        if result is None:
            result = recent.again(key)
        if result is None:
            try:
                result = recent[key] = _prepare(func, ops_of, tensor, args, kwargs)
            except RuntimeError as error:
                if "self.stride(" in str(error):  # torch looks at the offset first
                    _check_start(tensor, args[1].itemsize, args[1])
                raise
        start = tensor.storage_offset() * tensor.dtype.itemsize
        if start and start % result[0][3]:
            _check_start(tensor, result[0][3], args[1])
        views = [
            lazy_tensor.view_of(tensor, aval, chain, start // width + step)
            for aval, chain, step, width in result
        ]
        return views if many else views[0]

    return handler


def _check_start(tensor: lazy_tensor.LazyTensor, width: int, dtype: torch.dtype) -> None:
    """Refuse to view memory as wider elements from within one of them."""
    step, start = width // tensor.dtype.itemsize, tensor.storage_offset()
    if step and start % step:
        raise RuntimeError(
            f"self.storage_offset() must be divisible by {step} to view {spelled(tensor.dtype)} as "
            f"{spelled(dtype)} (different element sizes), but got {start}"
        )


def _hashable(value: Any) -> Any:
    return tuple(_hashable(entry) for entry in value) if isinstance(value, list | tuple) else value


def _prepare(
    func: OpOverload,
    ops_of: Callable[..., list[list[ViewOp]]],
    tensor: lazy_tensor.LazyTensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[tuple[Aval, Chain, int, int]]:
    meta = tensor._aval.meta
    outputs = func(meta.tensor(), *args[1:], **kwargs)
    outs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    metas = [Meta.of(out) for out in outs]
    result = []
    for ops, out, real in zip(
        ops_of(meta.size, metas, *args[1:], **kwargs), metas, outs, strict=True
    ):
        chain = tensor._chain
        for op in ops:
            chain = chain.then(op)
        result.append((Aval.of(out), chain, real.storage_offset(), out.dtype.itemsize))
    return result


def _as_strided(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`as_strided(self, size, stride, storage_offset=None)`: addresses the storage itself."""
    tensor = args[0]
    size, stride = tuple(args[1]), tuple(args[2])
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    if offset is None:
        offset = tensor.storage_offset()
    check_stride_count(size, stride)
    check_strides("as_strided", stride, offset)
    base_aval = tensor._storage.aval
    aval = Aval.of(Meta(size, stride, tensor._aval.meta.dtype))
    root = Chain.root(base_aval)
    same_width = _same_width(base_aval, aval)
    if not same_width and not _as_wide(base_aval, aval):
        raise RuntimeError(
            f"as_strided of a {tensor.dtype} view of {base_aval.meta.dtype} memory is not possible "
            f"on the {naming.current().type} device: its buffers have elements of another "
            "width. Call it on a .clone()."
        )
    extent = 1 + sum(
        step * (length - 1)
        for step, length in zip(base_aval.meta.stride, base_aval.meta.size, strict=True)
    )
    extent = extent * base_aval.meta.dtype.itemsize // aval.meta.dtype.itemsize
    last = offset + sum(step * (length - 1) for step, length in zip(stride, size, strict=True))
    if 0 not in size and last >= extent:
        raise RuntimeError(
            f"as_strided(size={size}, stride={stride}, storage_offset={offset}) reaches element "
            f"{last} of a storage of {extent} elements"
        )
    if same_width:
        chain = root.then(("strided", size, stride, offset))
        if base_aval.meta.dtype != tensor.dtype:
            chain = chain.then(("bitcast", size, aval.physical))
    else:
        chain = root.flat(aval.physical).then(("taken", size, stride, offset))
    for sign in (("conj",), ("neg",)):
        if tensor._chain.ops.count(sign) % 2:
            chain = chain.then(sign)
    return lazy_tensor.view_of(tensor, aval, chain, offset)


def check_strides(name: str, stride: Sequence[int], offset: int = 0) -> None:
    """Raise RuntimeError for memory read backwards, or from before its begin."""
    if any(step < 0 for step in stride):
        raise RuntimeError(
            f"{name}: Negative strides are not supported at the moment, got strides: {list(stride)}"
        )
    if offset < 0:
        raise RuntimeError(f"{name}: invalid storage offset {offset}")


def _same_width(aval: Aval, other: Aval) -> bool:
    """Whether the elements are as wide, for torch and in JAX's buffers."""
    if aval.meta.dtype == other.meta.dtype:
        return True
    logical = aval.meta.dtype.itemsize == other.meta.dtype.itemsize
    return logical and aval.physical.itemsize == other.physical.itemsize


def _as_wide(aval: Aval, other: Aval) -> bool:
    """Whether JAX stores elements of both dtypes as wide as torch does."""
    return all(aval.meta.dtype.itemsize == aval.physical.itemsize for aval in (aval, other))


_IN_PLACE = {
    "t_": "t",
    "transpose_": "transpose.int",
    "unsqueeze_": "unsqueeze",
    "squeeze_": "squeeze",
    "squeeze_.dim": "squeeze.dim",
    "squeeze_.dims": "squeeze.dims",
    "as_strided_": "as_strided",
}


def _in_place_handler(view: Any) -> Any:
    """Operators such as `t_` change how a tensor views its memory."""

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lazy_tensor.adopt(args[0], view(args, kwargs))
        return args[0]

    return handler


def _copied(view: Any) -> Any:
    """Operators such as `slice_copy`: what a view shows, in memory of its own."""

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = view(args, kwargs)
        clone, form = torch.ops.aten.clone.default, torch.contiguous_format
        if isinstance(outputs, list):
            return [clone(view, memory_format=form) for view in outputs]
        return clone(outputs, memory_format=form)

    return handler


def _scattered(func: OpOverload) -> dispatch.Handler:
    """`as_strided_scatter` of a view writes to a copy of the memory that the view is of."""
    usual = dispatch.functional_handler(func)

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, src, *window = args
        signed = any(op in (("conj",), ("neg",)) for op in tensor._chain.ops)
        if signed or not tensor._chain.ops:  # torch resolves a conjugate to memory of its own
            return usual(args, kwargs)
        storage = tensor._storage
        full = lazy_tensor.new_tensor(storage.aval, storage, Chain.root(storage.aval))
        memory = lazy_tensor.fresh(storage.aval, lazy_tensor.read(full))._storage
        offset = tensor.storage_offset()
        view = lazy_tensor.new_tensor(tensor._aval, memory, tensor._chain, offset)
        window_view = _as_strided((view, *window), kwargs)
        check_written_once("as_strided_scatter", {"size": window[0], "stride": window[1]})
        if src.shape != window_view.shape:
            raise RuntimeError(
                "expected src to have a size equal to the slice of self. src size = "
                f"{list(src.shape)}, slice size = {list(window_view.shape)}"
            )
        torch.ops.aten.copy_.default(window_view, src)
        return view

    return handler


def register() -> None:
    """Put the view operators into the dispatcher."""
    for name, ops_of in _OPS.items():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        func = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if func is not None:
            dispatch.SPECIAL[name] = _view_handler(func, ops_of)
    dispatch.SPECIAL["aten::as_strided"] = _as_strided
    scatter = torch.ops.aten.as_strided_scatter.default
    dispatch.SPECIAL[scatter.name()] = _scattered(scatter)
    for name in (*_OPS, "aten::as_strided"):
        packet, _, overload = name.partition(".")
        copying = f"{packet}_copy.{overload}" if overload else f"{packet}_copy"
        dispatch.SPECIAL[copying] = _copied(dispatch.SPECIAL[name])
    for name in _IN_PLACE:
        dispatch.SPECIAL[f"aten::{name}"] = _in_place_handler(
            dispatch.SPECIAL[f"aten::{_IN_PLACE[name]}"]
        )


with optional():
    register()
