"""Operations that are more than a computation: transfers between host and device, and questions.

`copy_` and `_to_copy` move values in and out; `item`, `equal` and boolean indexing need values now,
so they execute the tape; factories make storages out of nothing.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch

from isoshard.core.runtime import metrics
from isoshard.core.runtime.private_names import optional
from isoshard.torch_bridge._torch_internals.undocumented import Uninitialized
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.values.value import contiguous_stride

from . import (
    cpu_fallback,
    dispatch,
    expanded_writes,
    global_tensors,
    mask_counts,
    overlaps,
    reading,
    uninitialized,
)
from .call_template import import_tensor

aten = torch.ops.aten


def _to_copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor = args[0]
    device = kwargs.get("device")
    dtype = kwargs.get("dtype") or tensor.dtype
    if device is not None and torch.device(device).type not in naming.OURS:
        host = reading.to_host(tensor)
        format = kwargs.get("memory_format") or torch.preserve_format
        if format is torch.preserve_format:
            host = _with_strides_of(tensor, host)
        copy = host.to(device=device, dtype=dtype, memory_format=format)
        if naming.is_torch_xla() and getattr(tensor, "mesh", None) is not None:
            global_tensors.note(copy)
        return copy
    rest = {name: value for name, value in kwargs.items() if name in ("dtype", "memory_format")}
    return _cast(args, rest)


def _with_strides_of(tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """A packed CPU tensor with the axes in memory in the order that those of another have."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    stride = torch.empty_like(meta).stride()
    if host.stride() == stride:
        return host
    return torch.empty_strided(host.shape, stride, dtype=host.dtype).copy_(host)


_cast: Any = None


def _copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`copy_(self, src)` in all directions."""
    target, source = args[0], args[1]
    if not isinstance(target, lazy_tensor.LazyTensor):
        return target.copy_(reading.to_host(source))
    if source is target:  # torch returns before it looks at either
        return target
    overlaps.check_writable(aten.copy_.default, target)
    if not isinstance(source, torch.Tensor):
        return aten.fill_.Scalar(target, source)
    if isinstance(source, lazy_tensor.LazyTensor):
        overlaps.check_overlap(target, (source,), nothing=False)
        same = source._aval.token == target._aval.token and source.dtype == target.dtype
        if same:
            lazy_tensor.write(target, lazy_tensor.read(source))
        else:
            _copy_cast((target, source), {})
        return target
    if source.device.type != "cpu":
        source = source.cpu()
    if isinstance(source, Uninitialized):
        raise RuntimeError(
            "a lazy module has no shapes before it has run once, and cannot be moved to the jax "
            f"device yet: run it once on the CPU, then move it with {naming.moving()}"
        )
    recorder().refuse_upload(source)
    shape, dtype = target.shape, target.dtype
    value = lazy_tensor.host_value(source.expand(shape).to(dtype))
    lazy_tensor.note_operand(value, source, lambda now: now.expand(shape).to(dtype))
    lazy_tensor.write(target, value)
    return target


_copy_cast: Any = None


def _item(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    constant = None if args[0].is_floating_point() else reading.constant(args[0])
    if constant is not None:
        return constant.item()
    return reading.to_host(args[0]).item()


def _equal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    left, right = (import_tensor(aten.equal.default, arg) for arg in args)
    if left.shape != right.shape:
        return False
    return bool(aten.all.default(aten.eq.Tensor(left, right)).item())


def allclose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors are about equal, which is read now."""
    return bool(torch.isclose(*args, **kwargs).all().item())


def _same_storage_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """What forward-mode differentiation reads of a tensor and its tangent."""
    left, right = map(_elements_in_memory, args)
    return left == right


def _elements_in_memory(tensor: torch.Tensor) -> int:
    """Of all the memory that a tensor views; a CPU tensor may be compared with a `jax` one."""
    if isinstance(tensor, lazy_tensor.LazyTensor):
        return math.prod(tensor._storage.aval.meta.size)
    return tensor.untyped_storage().nbytes() // tensor.itemsize


def _zeros_in_memory_like(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A tangent of zeros with the memory layout of `other`, after batch axes."""
    tensor, other = args
    batch = tuple(tensor.shape[: kwargs.get("self_num_batch_dims", 0)])
    extent = _elements_in_memory(other)
    size = (*batch, *other.shape)
    steps = [extent * step for step in contiguous_stride(batch)]
    zeros = aten.new_zeros.default(tensor, [math.prod(batch) * extent])
    return aten.as_strided.default(zeros, size, [*steps, *other.stride()], other.storage_offset())


_DATA_DEPENDENT = (
    "nonzero",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "repeat_interleave.Tensor",
    "bincount",
    "_assert_async",
    "_assert_async.msg",
)


def _index(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`index.Tensor`: boolean masks have a data-dependent result; integer indices do not."""
    tensor, indices = args[0], list(args[1])
    if not isinstance(tensor, lazy_tensor.LazyTensor) and not tapes.takes_constants():
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor "
            f"({tensor.device}); move the tensor with {naming.moving()}, or the indices with .cpu()"
        )
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        if recorder().refusal is None:
            return _index_on_host((tensor, indices), kwargs)
        indices = _positions(indices)  # the mask may have values where the tensor has none
    return _index_static((tensor, indices), kwargs)


_index_on_host: Any = None
_index_static: Any = None


def _masked_select(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    if recorder().refusal is None:
        return _masked_select_on_host(args, kwargs)
    tensor, mask = (tensor.reshape(-1) for tensor in torch.broadcast_tensors(*args))
    return aten.index.Tensor(tensor, [mask])


_masked_select_on_host: Any = None


def _index_put(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`index_put_`: a boolean mask with one value is a `where`; with many, positions are needed."""
    tensor, indices, values = _checked_put(args)
    if isinstance(tensor, lazy_tensor.LazyTensor) and tensor._aval.expanded:
        return expanded_writes.put(tensor, indices, values, *args[3:4])
    return _put((tensor, indices, values, *args[3:]), kwargs)


def _index_put_new(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`index_put`, likewise."""
    return _put_new((*_checked_put(args), *args[3:]), kwargs)


def _checked_put(args: tuple[Any, ...]) -> tuple[Any, list[Any], Any]:
    tensor, indices, values = args[0], list(args[1]), args[2]
    masks = [index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices]
    if any(masks):
        mask_counts.warn_of_bytes(indices)
        if sum(index is not None for index in indices) > 1:
            indices = _positions(indices)
        mask_counts.check_put(tensor, indices, values)
    return tensor, indices, values


_put: Any = None
_put_new: Any = None


def _put_elements(handler: dispatch.Handler) -> dispatch.Handler:
    """`put` and `put_`, which torch has no deterministic implementation of on any device."""

    def handled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.are_deterministic_algorithms_enabled() and not any(args[3:]):
            message = (
                "put_ does not have a deterministic implementation, but you set "
                "'torch.use_deterministic_algorithms(True"
            )
            if not torch.is_deterministic_algorithms_warn_only_enabled():
                raise RuntimeError(f"{message})'. You can turn off determinism just for it.")
            warnings.warn(f"{message}, warn_only=True)'.", UserWarning, stacklevel=2)
        return handler(args, kwargs)

    return handled


def _positions(indices: list[Any]) -> list[Any]:
    """Boolean masks replaced by the integer indices of their True elements."""
    result: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            metrics.count("fallbacks")
            metrics.count("fallbacks.boolean index")
            host = reading.to_host(index) if isinstance(index, lazy_tensor.LazyTensor) else index
            result += [cpu_fallback.upload(axis) for axis in host.nonzero(as_tuple=True)]
        else:
            result.append(index)
    return result


def _set(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor = args[0]
    if len(args) == 1:
        lazy_tensor.adopt(tensor, aten.new_empty.default(tensor, [0]))
        return tensor
    source, *view = args[1:]
    if source.dtype != tensor.dtype:
        raise RuntimeError(
            f"Could not set tensor of type {source.dtype} to a tensor of type {tensor.dtype}"
        )
    if view:  # within the memory of the source, wherever the source begins
        offset, size = view[0], tuple(view[1])
        stride = tuple(view[2]) if len(view) > 2 and view[2] else contiguous_stride(size)
        source = aten.as_strided.default(source, size, stride, offset)
    lazy_tensor.adopt(tensor, source)
    return tensor


def _is_set_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    tensor, other = args
    views = [(x.storage_offset(), x.shape, x.stride(), x.dtype) for x in args]
    return tensor._storage is other._storage and views[0] == views[1]


def _resize(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`resize_`: another shape over the same memory, or over a larger copy of it."""
    tensor, size, form = args[0], tuple(args[1]), kwargs.get("memory_format")
    if size == tuple(tensor.shape) and form is None:
        return tensor
    meta = torch.empty(size, dtype=tensor.dtype, device="meta", memory_format=form)
    offset, memory = tensor.storage_offset(), tensor._storage.aval
    need = offset + (1 + sum((n - 1) * s for n, s in zip(size, meta.stride(), strict=True)))
    need = need * tensor.dtype.itemsize if math.prod(size) else 0
    have = math.prod(memory.meta.size) * memory.meta.dtype.itemsize
    source = tensor
    if need > have:
        count = have // tensor.dtype.itemsize
        flat = aten.as_strided.default(tensor, [count], [1], 0)
        more = [0, need // tensor.dtype.itemsize - count]
        source = aten.constant_pad_nd.default(flat, more, uninitialized.content(tensor.dtype))
    lazy_tensor.adopt(tensor, aten.as_strided.default(source, size, meta.stride(), offset))
    return tensor


def _resize_as(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor, other = args
    form = kwargs.get("memory_format")
    if form == torch.preserve_format:
        forms = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
        ranks = (other.dim(), 4, 5)
        fits = [f for f, rank in zip(forms, ranks, strict=True) if rank == other.dim()]
        form = next((f for f in fits if other.is_contiguous(memory_format=f)), fits[0])
    return _resize((tensor, other.shape), {"memory_format": form})


def _ldexp(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Powers of the number 2, in their own dtype; torch's decomposition has them in that of `x`."""
    x, powers = args
    are_integral = not (powers.is_floating_point() or powers.is_complex())
    if not isinstance(powers, lazy_tensor.LazyTensor) or (x.is_floating_point() and are_integral):
        return _scaled_floats()(args, kwargs)
    return dispatch.handle(
        aten.mul.Tensor, (x, dispatch.handle(aten.pow.Scalar, (2.0, powers), {})), {}
    )


@functools.cache
def _scaled_floats() -> dispatch.Handler:
    return dispatch.functional_handler(aten.ldexp.Tensor)


def register() -> None:
    """Put the special operations into the dispatcher."""
    global _cast, _copy_cast, _index_on_host, _index_static, _masked_select_on_host
    global _put, _put_new
    _cast = dispatch.functional_handler(aten._to_copy.default)
    _copy_cast = dispatch.in_place_handler(aten.copy_.default, ["self"])
    _index_on_host = cpu_fallback.on_host(aten.index.Tensor)
    _masked_select_on_host = cpu_fallback.on_host(aten.masked_select.default)
    _index_static = dispatch.functional_handler(aten.index.Tensor)
    _put = dispatch.in_place_handler(aten.index_put_.default, ["self"])
    _put_new = dispatch.functional_handler(aten.index_put.default)
    dispatch.SPECIAL.update(
        {
            "aten::_to_copy": _to_copy,
            "aten::copy_": _copy,
            "aten::_copy_from": lambda args, kwargs: _copy((args[1], args[0]), {}),
            "aten::_local_scalar_dense": _item,
            "prims::convert_element_type": lambda args, kwargs: _cast(args[:1], {"dtype": args[1]}),
            "aten::equal": _equal,
            "aten::allclose": allclose,
            "aten::_has_same_storage_numel": _same_storage_size,
            "aten::_new_zeros_with_same_feature_meta": _zeros_in_memory_like,
            "aten::is_same_size": lambda args, kwargs: args[0].shape == args[1].shape,
            "aten::index.Tensor": _index,
            "aten::masked_select": _masked_select,
            "aten::index_put": _index_put_new,
            "aten::put": _put_elements(dispatch.functional_handler(aten.put.default)),
            "aten::put_": _put_elements(dispatch.in_place_handler(aten.put_.default, ["self"])),
            "aten::index_put_": _index_put,
            "aten::_index_put_impl_": lambda args, kwargs: _index_put(args[:4], kwargs),
            "aten::set_": _set,
            "aten::set_.source_Tensor": _set,
            "aten::set_.source_Tensor_storage_offset": _set,
            "aten::is_set_to": _is_set_to,
            "aten::resize_": _resize,
            "aten::resize_as_": _resize_as,
            "aten::_lazy_clone": lambda args, kwargs: aten.clone.default(*args, **kwargs),
            "aten::is_pinned": lambda args, kwargs: False,
            "aten::ldexp.Tensor": _ldexp,
        }
    )
    for func in uninitialized.FACTORIES:
        dispatch.SPECIAL[func.name()] = uninitialized.filled(dispatch.functional_handler(func))
    for name in _DATA_DEPENDENT:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(aten, packet, None), overload or "default", None)
        if func is not None:
            dispatch.SPECIAL[func.name()] = cpu_fallback.on_host(func)


with optional():
    register()
