"""Writes that torch rejects because of the memory: what is read and written to share it.

On the device a write gives a memory a new value, so it could not go wrong. It is rejected all the
same: what runs here must also run, and give the same, on other devices. As in torch, only tensors
that fill a range of memory are looked at.

>>> x = torch.arange(4.0, device="jax")
>>> x[1:].copy_(x[:-1])
Traceback (most recent call last):
...
RuntimeError: unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location. Please clone() the tensor before performing the operation.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from isoshard.core.runtime import metrics
from isoshard.torch_bridge._torch_internals import OpOverload, schema_of
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.recording import lazy_tensor

_NO_SHARING = frozenset(
    {
        *("gather", "index_add", "index_copy", "index_fill", "index_put", "_index_put_impl"),
        *("index_select", "masked_select", "put", "scatter", "scatter_add"),
        *("scatter_reduce", "take", "cat", "stack", "kthvalue"),
    }
)
"""Operators that read at other places than they write to, so may not even read what they write."""

_BY_POSITION = frozenset({"copy", "cumsum", "cumprod", "masked_fill", "masked_scatter"})


def rule(func: OpOverload) -> bool | None:
    """What an operator's operands may share with what it writes to.

    Returns:
        True: nothing. False: all or nothing. None: torch does not look.
    """
    name = schema_of(func).name.removeprefix("aten::").removesuffix("_")
    if name in _NO_SHARING:
        return True
    return False if name in _BY_POSITION or torch.Tag.pointwise in func.tags else None


def check_overlap(target: Any, operands: Iterable[Any], nothing: bool) -> None:
    """Refuse operands that share memory with a tensor that is written to.

    Raises:
        RuntimeError: one does.
    """
    for operand in operands:
        if operand._storage is not target._storage or (operand is target and not nothing):
            continue
        same = operand is target  # which torch's operators see without a look at its memory
        if same or _overlap(target, operand, nothing):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to "
                "tensor refer to a single memory location. Please clone() the tensor before "
                "performing the operation."
            )


def _overlap(target: Any, operand: Any, nothing: bool) -> bool:
    written, other = _range(target), _range(operand)
    if written is None or other is None:
        return False
    if written == other:
        return nothing or tuple(target.stride()) != tuple(operand.stride())
    return written[0] < other[1] and other[0] < written[1]


def _range(tensor: Any) -> tuple[int, int] | None:
    """The bytes of a tensor's memory that it fills; None if it leaves gaps, or has none."""
    meta = tensor._aval.meta
    extent = 1
    for step, size in sorted(zip(meta.stride, meta.size, strict=True)):
        if size != 1:
            if step != extent:
                return None
            extent *= size
    width, start = meta.dtype.itemsize, tensor.storage_offset()
    return (start * width, (start + extent) * width) if extent else None


def check_writable(func: Any, tensor: torch.Tensor) -> None:
    """Reject what torch rejects: writing to a CPU tensor from here, or to a broadcast view."""
    if not isinstance(tensor, lazy_tensor.LazyTensor):
        if metrics.is_calling("torch.optim"):
            raise RuntimeError(
                f"the optimizer's state is on {tensor.device}, and its parameters are on "
                f"{naming.current()}: it was made before they were moved. Move it as well, with "
                "optimizer.load_state_dict(optimizer.state_dict()), or make the optimizer after "
                "the model was moved"
            )
        raise RuntimeError(
            f"{func} would write values of jax tensors into a tensor on {tensor.device}; move them "
            "with .cpu() first"
        )
    if tensor._aval.expanded:
        raise RuntimeError(
            f"unsupported operation: {func} writes to an expanded tensor, in which more than one "
            "element refers to a single memory location. Please clone() the tensor first."
        )
