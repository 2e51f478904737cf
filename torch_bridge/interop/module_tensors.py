"""Arrays of JAX as tensors in the place of a module's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.module_fields import own_buffers, own_parameters
from isoshard.torch_bridge.common.argument_types import ArrayLike
from isoshard.torch_bridge.common.dtypes import physical_dtype
from isoshard.torch_bridge.common.wrapper_tensors import expanded, joined
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.layout.widths import jax_dtype

from .recorded_function import Take


def check(arrays: Mapping[str, ArrayLike], tensors: Mapping[str, torch.Tensor], what: str) -> None:
    """Check arrays against the shapes and dtypes of a module's tensors.

    Raises:
        ValueError: some have other shapes or dtypes.
    """
    errors = []
    for name, array in arrays.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            continue
        tensor = tensors[name]
        shape, dtype = tuple(tensor.shape), physical_dtype(tensor.dtype)
        array_dtype = array.dtype
        array_dtype = (
            physical_dtype(array_dtype) if isinstance(array_dtype, torch.dtype) else array_dtype
        )
        if tuple(array.shape) != shape or array_dtype not in (dtype, jax_dtype(dtype)):
            errors.append(
                f"{name} is {array_dtype}{list(array.shape)} and the module's {dtype}{list(shape)}"
            )
    if errors:
        more = f", and {len(errors) - 10} more" if len(errors) > 10 else ""
        raise ValueError(
            f"{what} must have the shapes and dtypes of the module: {'; '.join(errors[:10])}{more}."
            " For another dtype convert the module, such as by module.bfloat16()"
        )


def replacements(
    arrays: Mapping[str, ArrayLike], tensors: Mapping[str, torch.Tensor], take: Take
) -> dict[str, torch.Tensor]:
    """Tensors in the place of a module's.

    A tensor over the memory of a larger one becomes a view of the larger one's replacement, so that
    writes show in both; its own array is ignored.
    """
    inner = expanded(tensors)
    bases = _bases(inner)
    new = {name: take(array, like=inner[name]) for name, array in arrays.items()}
    for name, (base, offset) in bases.items():
        if name in new and base in new:
            tensor = inner[name]
            new[name] = new[base].as_strided(tensor.shape, tensor.stride(), offset)
    return joined(tensors, new)


def _bases(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, int]]:
    """For tensors that are views into larger ones: the name of the larger one, and the offset."""
    by_memory: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        by_memory.setdefault(_memory(tensor), []).append(name)
    bases = {}
    for names in by_memory.values():
        base = max(names, key=lambda name: tensors[name].numel())
        first = tensors[base]
        for name in names if first.is_contiguous() else ():
            offset = tensors[name].storage_offset() - first.storage_offset()
            inside = offset >= 0 and offset + _extent(tensors[name]) <= first.numel()
            if name != base and inside and tensors[name].dtype == first.dtype:
                bases[name] = (base, int(offset))
    return bases


def _memory(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, lazy_tensor.LazyTensor):
        return id(tensor._storage)
    if tensor.is_meta or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return id(tensor)
    return (tensor.device, tensor.untyped_storage().data_ptr()) if tensor.numel() else id(tensor)


def _extent(tensor: torch.Tensor) -> int:
    """The number of elements in memory from a tensor's first to its last."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((extent - 1) * step for extent, step in pairs)


@contextmanager
def unchanged(module: torch.nn.Module, name: str) -> Iterator[None]:
    """Context in which a module must not register new tensors.

    Raises:
        RuntimeError: it has registered some, which are removed again.
    """
    before = {
        id(child): (set(own_parameters(child)), set(own_buffers(child)))
        for child in module.modules()
    }
    yield
    new = []
    for path, child in module.named_modules():
        names_before = before.get(id(child), (set[str](), set[str]()))
        for tensors, names in zip(
            (own_parameters(child), own_buffers(child)), names_before, strict=True
        ):
            for key in tensors.keys() - names:
                del tensors[key]
                new.append(f"{path}.{key}" if path else key)
    if new:
        raise RuntimeError(
            f"{name} registers {', '.join(sorted(new)[:10])} while it is called, and a pure "
            "function cannot keep that. Call the module once in torch first: then the tensors are "
            "among the function's params"
        )
