"""The error that CPU torch raises for a call that fails here.

Torch's kernels look at axes, dtypes and shapes in an order of their own, so a call with two faults
raises what its kernel looks at first. Where a call failed, its kernel is run, with zeros of
the same shapes, strides and dtypes on the CPU; its error counts if it is of another class.

>>> import isoshard.torch_bridge
>>> torch.ones(2, 2, dtype=torch.complex64, device="jax").max(2)
Traceback (most recent call last):
...
IndexError: Dimension out of range (expected to be in range of [-2, 1], but got 2)
"""

from __future__ import annotations

import builtins
import math
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import OpOverload
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values.metas import map_leaves

_UNSAFE = frozenset(
    {
        *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
        *("_batch_norm_with_update", "_batch_norm_with_update_functional", "batch_norm_backward"),
        *("native_batch_norm_backward", "_native_batch_norm_legit_no_training"),
        *("_batch_norm_no_update", "lu_unpack", "segment_reduce", "_segment_reduce_backward"),
    }
)
"""Kernels of the CPU that read and write beyond tensors of the wrong sizes (torch 2.13)."""

_MOST = 2**24
"""Bytes read, and elements made, at most; a larger call keeps the error that it has."""


def like_cpu(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> Exception:
    """What a failed call raises: CPU torch's own error, where that is of another class.

    Args:
        func: an overload; only torch's own are run on the CPU.
        args: its arguments, tensors on the `jax` device.
        kwargs: likewise.
        error: its error; errors of isoshard's own classes are kept.
    """
    name = func.name().removeprefix("aten::").split(".")[0]
    is_own = type(error).__module__ != builtins.__name__
    if is_own or func.namespace != "aten" or name in _UNSAFE or "nested" in name:
        return error
    leaves = _leaves((args, tuple(kwargs.values())))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(not isinstance(tensor, lazy_tensor.LazyTensor) for tensor in tensors):
        return error
    if sum(map(_extent, tensors)) > _MOST or not _makes_little(func, args, kwargs, leaves):
        return error
    memory = _memory(tensors)
    draws = torch.Tag.nondeterministic_seeded in func.tags
    try:
        with torch.random.fork_rng(devices=(), enabled=draws):
            _call(func, args, kwargs, lambda leaf: _on_cpu(leaf, memory))
    except Warning:  # where warnings are errors
        return error
    except Exception as theirs:
        same = type(theirs) is type(error) or "Could not run" in str(theirs)  # no kernel for CPUs
        return error if same else theirs
    return error


def _leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []
    map_leaves(leaves.append, value)
    return leaves


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], convert: Any) -> Any:
    """Call an overload with each argument placed elsewhere."""
    named = {name: map_leaves(convert, value) for name, value in kwargs.items()}
    return func(*(map_leaves(convert, arg) for arg in args), **named)


def _makes_little(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
) -> bool:
    """Whether a call makes few elements; its numbers may be sizes."""
    try:
        results = _call(func, args, kwargs, _on_meta)
    except NotImplementedError:  # no shape is known
        return math.prod(abs(leaf) or 1 for leaf in leaves if type(leaf) is int) < _MOST
    except Exception:
        return True
    return sum(leaf.numel() for leaf in _leaves(results) if isinstance(leaf, torch.Tensor)) <= _MOST


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, lazy_tensor.LazyTensor):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.Generator):
        return None
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _memory(tensors: list[Any]) -> dict[int, torch.Tensor]:
    """Zeros for each memory of the device; views of one memory share it."""
    memory: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        storage, extent = id(tensor._storage), _extent(tensor)
        if storage not in memory or memory[storage].nbytes < extent:
            memory[storage] = torch.zeros(extent, dtype=torch.uint8)
    return memory


def _on_cpu(leaf: Any, memory: dict[int, torch.Tensor]) -> Any:
    if isinstance(leaf, lazy_tensor.LazyTensor):
        elements = memory[id(leaf._storage)].view(leaf.dtype)
        return elements.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())
    if isinstance(leaf, torch.Generator):
        return None
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of its memory to the last element of a tensor."""
    last = sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))
    elements = tensor.storage_offset() + (last + 1 if tensor.numel() else 0)
    return 16 * math.ceil(elements * tensor.element_size() / 16)  # a multiple of every dtype's size
