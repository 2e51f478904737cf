"""The error that CPU torch raises for a call that is refused here.

Torch's kernels look at axes, dtypes and shapes in an order of their own, so a call with two faults
raises what its kernel looks at first. Where a call was refused, its kernel is asked, with zeros of
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
import warnings
from typing import Any

import torch
from torch.utils import _pytree as pytree

from isoshard.torch_bridge._torch_internals import OpOverload

from . import base

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
    """What a refused call raises: CPU torch's own error, where that is of another class.

    Args:
        func: an overload; the CPU is asked for torch's own only.
        args: its arguments, tensors on the `jax` device.
        kwargs: likewise.
        error: what it was refused with; errors of isoshard's own classes stay.
    """
    own = type(error).__module__ not in (builtins.__name__, torch.__name__, "torch._C")
    name = func.name().removeprefix("aten::").split(".")[0]
    if own or func.namespace != "aten" or name in _UNSAFE:
        return error
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(not isinstance(tensor, base.LazyTensor) for tensor in tensors):
        return error
    if not _cheap(func, leaves, tree):
        return error
    args, kwargs = pytree.tree_unflatten(_on_cpu(leaves), tree)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
            warnings.simplefilter("ignore")
            func(*args, **kwargs)
    except Exception as theirs:
        return error if type(theirs) is type(error) else theirs
    return error


def _cheap(func: OpOverload, leaves: list[Any], tree: Any) -> bool:
    """Whether a call neither reads nor makes many elements; sizes may stand in its numbers."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if sum(map(_extent, tensors)) > _MOST:
        return False
    args, kwargs = pytree.tree_unflatten([_on_meta(leaf) for leaf in leaves], tree)
    try:
        made = func(*args, **kwargs)
    except NotImplementedError:  # no shape is known
        return math.prod(abs(leaf) or 1 for leaf in leaves if type(leaf) is int) < _MOST
    except Exception:
        return True
    made = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() for tensor in made) <= _MOST


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, base.LazyTensor):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.Generator):
        return None
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _on_cpu(leaves: list[Any]) -> list[Any]:
    """The arguments with zeros for what lies on the device; views of one memory stay so."""
    memory: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, base.LazyTensor):
            storage, extent = id(leaf._storage), _extent(leaf)
            if storage not in memory or memory[storage].nbytes < extent:
                memory[storage] = torch.zeros(extent, dtype=torch.uint8)
    return [_of(leaf, memory) for leaf in leaves]


def _of(leaf: Any, memory: dict[int, torch.Tensor]) -> Any:
    if isinstance(leaf, base.LazyTensor):
        whole = memory[id(leaf._storage)].view(leaf.dtype)
        return whole.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())
    if isinstance(leaf, torch.Generator):
        return None
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of its memory to the last element of a tensor."""
    last = sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))
    elements = tensor.storage_offset() + (last + 1 if tensor.numel() else 0)
    return 16 * math.ceil(elements * tensor.element_size() / 16)  # holds whole numbers of any dtype
