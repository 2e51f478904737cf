"""A module's tensors, made of arrays that JAX gives for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.module_fields import own_buffers, own_parameters
from isoshard.torch_bridge.common.argument_types import ArrayLike
from isoshard.torch_bridge.common.dtypes import physical_dtype
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.layout.widths import jax_dtype

from .recorded_function import Take


def check(arrays: Mapping[str, ArrayLike], own: Mapping[str, torch.Tensor], what: str) -> None:
    """Refuse arrays that are not what a module has.

    Args:
        arrays: by name.
        own: the module's tensors.
        what: of which module they are, for the message.

    Raises:
        ValueError: some have other shapes or dtypes.
    """
    faults = []
    for name, array in arrays.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            continue
        mine = own[name]
        shape, dtype = tuple(mine.shape), physical_dtype(mine.dtype)
        given = array.dtype
        given = physical_dtype(given) if isinstance(given, torch.dtype) else given
        if tuple(array.shape) != shape or given not in (dtype, jax_dtype(dtype)):
            faults.append(
                f"{name} is {given}{list(array.shape)} and the module's {dtype}{list(shape)}"
            )
    if faults:
        more = f", and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise ValueError(
            f"{what} must have the shapes and dtypes of the module: {'; '.join(faults[:10])}{more}."
            " For another dtype convert the module, such as by module.bfloat16()"
        )


def taken(
    arrays: Mapping[str, ArrayLike], own: Mapping[str, torch.Tensor], take: Take
) -> dict[str, torch.Tensor]:
    """Tensors in the place of a module's.

    One that is a part of another's memory is a part of the other, so that it sees what is written
    there; its own array counts for nothing.

    Args:
        arrays: by name.
        own: the module's tensors.
        take: makes tensors of arrays.
    """
    wholes = _wholes(own)
    found = {name: take(array, like=own[name]) for name, array in arrays.items()}
    for name, (whole, offset) in wholes.items():
        if name in found and whole in found:
            mine = own[name]
            found[name] = found[whole].as_strided(mine.shape, mine.stride(), offset)
    return found


def _wholes(own: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, int]]:
    """Of tensors that are parts of others: of which, and where they begin in it."""
    by_memory: dict[Any, list[str]] = {}
    for name, tensor in own.items():
        by_memory.setdefault(_memory(tensor), []).append(name)
    found = {}
    for names in by_memory.values():
        whole = max(names, key=lambda name: own[name].numel())
        first = own[whole]
        for name in names if first.is_contiguous() else ():
            offset = own[name].storage_offset() - first.storage_offset()
            inside = offset >= 0 and offset + _extent(own[name]) <= first.numel()
            if name != whole and inside and own[name].dtype == first.dtype:
                found[name] = (whole, int(offset))
    return found


def _memory(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, lazy_tensor.LazyTensor):
        return id(tensor._storage)
    if tensor.is_meta or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return id(tensor)
    return (tensor.device, tensor.untyped_storage().data_ptr()) if tensor.numel() else id(tensor)


def _extent(tensor: torch.Tensor) -> int:
    """How many elements of memory there are from a tensor's first to its last."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((extent - 1) * step for extent, step in pairs)


@contextmanager
def unchanged(module: torch.nn.Module, name: str) -> Iterator[None]:
    """Context in which a module gets no tensors that it did not have.

    Args:
        module: whose code runs.
        name: of it, for the message.

    Raises:
        RuntimeError: it has registered some, which are taken away again.
    """
    before = {
        id(one): (set(own_parameters(one)), set(own_buffers(one))) for one in module.modules()
    }
    yield
    new = []
    for path, one in module.named_modules():
        known = before.get(id(one), (set[str](), set[str]()))
        for own, names in zip((own_parameters(one), own_buffers(one)), known, strict=True):
            for key in own.keys() - names:
                del own[key]
                new.append(f"{path}.{key}" if path else key)
    if new:
        raise RuntimeError(
            f"{name} registers {', '.join(sorted(new)[:10])} while it is called, and a pure "
            "function cannot keep that. Call the module once in torch first: then the tensors are "
            "among the function's params"
        )
