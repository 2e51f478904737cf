"""Loading: JAX arrays become a module's parameters, or an optimizer's state.

The reverse of `modules`. Every array is checked before anything is changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import torch

from isoshard.core.errors import CopyError, ShardingError, raise_collected
from isoshard.core.layout.partial_sums import unreduced
from isoshard.core.layout.spec import same_layout
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime import metrics
from isoshard.core.transfer.exchange import device_dtype
from isoshard.torch_bridge._torch_internals.dtensor_fields import LOCAL_TENSOR
from isoshard.torch_bridge.common.dtypes import numpy_dtype
from isoshard.torch_bridge.modules.modules import tensors as tensors_of

from . import routes, shard_memory
from .dtensor_modules import largest_mesh, named_params, rank_shard_on, reshard
from .recognition import fsdp_modules, is_dtensor


def load_arrays(
    target: torch.nn.Module | torch.optim.Optimizer,
    tree: Mapping[str, Any],
    *,
    copy: bool | None = None,
) -> None:
    """Put JAX arrays into a module or optimizer that is sharded over processes.

    Args:
        target: a module under FSDP2 or `parallelize_module`, or an optimizer of one. Its
            parameters stay the same objects.
        tree: as `iso.to_jax(target)` gives it: arrays by name, or for an optimizer
            `{kind: {parameter: array}}`; any part of that. Each array has the shape, dtype and
            layout of the tensor that it replaces. State that the optimizer does not have yet is
            created.
        copy: None shares the arrays' memory with the tensors and copies where that is impossible,
            False shares it or raises, True copies into the memory that the tensors have. Shared
            memory is the target's from then on: a step of torch writes to it.

    Raises:
        ShardingError: some arrays do not fit; all of them are in one error, nothing is changed.
        CopyError: an array cannot be shared under copy=False: FSDP2 pads parameters whose shards
            differ in size in memory of its own, 64-bit integers are stored as 32-bit ones while
            `jax_enable_x64` is off, and an array that is given twice is one buffer.
        TypeError: `target` is neither.

    Example:
        >>> import torch.distributed as dist, torch.distributed.tensor.parallel as tp
        >>> import isoshard as iso
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> device_mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
        >>> layer = tp.parallelize_module(torch.nn.Linear(2, 2), device_mesh, tp.ColwiseParallel())
        >>> arrays = iso.to_jax(layer)
        >>> load_arrays(layer, {"bias": jax.numpy.full_like(arrays["bias"], 3)})
        >>> layer.bias.to_local().tolist()
        [3.0, 3.0]
        >>> dist.destroy_process_group()
    """
    if isinstance(target, torch.nn.Module):
        _load_module(target, tree, copy)
    elif isinstance(target, torch.optim.Optimizer):
        _load_optimizer(target, tree, copy)
    else:
        raise TypeError(
            f"load_arrays takes a torch module or optimizer, not {type(target).__name__}"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Change:
    """A tensor, and the local tensor that replaces its own."""

    shard: routes.RankShard
    tensor: torch.Tensor
    new: torch.Tensor
    shares: bool

    def apply(self) -> None:
        """Share or copy."""
        old = self.shard.local
        if _start(old) == _start(self.new):
            return
        if self.shares and is_dtensor(self.tensor):
            LOCAL_TENSOR.put(self.tensor, self.new)
        elif self.shares:
            self.tensor.data = self.new
        else:
            metrics.count("copies")
            metrics.count("copied_bytes", self.new.numel() * self.new.itemsize)
            with torch.no_grad():
                old.copy_(self.new)


def _load_module(module: torch.nn.Module, tree: Mapping[str, Any], copy: bool | None) -> None:
    reshard(module)
    tensors = dict(tensors_of(module))
    mesh = largest_mesh(tensors.values(), type(module).__name__)
    fsdp = any(True for _ in fsdp_modules(module))
    pairs = _pairs(tree, tensors, type(module).__name__)
    _replace([(rank_shard_on(name, t, mesh), t, a) for name, t, a in pairs], copy, pads=fsdp)
    if fsdp:
        module.load_state_dict({}, strict=False)  # its hooks have FSDP2 look at the tensors anew


def _load_optimizer(
    optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], copy: bool | None
) -> None:
    params = named_params(optimizer)
    mesh = largest_mesh(params.values(), type(optimizer).__name__)
    replacements: list[tuple[routes.RankShard, torch.Tensor, Any]] = []
    new_state: list[tuple[torch.Tensor, str, Any]] = []
    for kind, values in tree.items():
        if not isinstance(values, Mapping):
            raise ShardingError(
                f"{kind} is {type(values).__name__}; an optimizer's state is given as "
                "{kind: {parameter: array}}, as iso.to_jax(optimizer) has it"
            )
        for name, param, value in _pairs(values, params, f"{type(optimizer).__name__} {kind}"):
            present = optimizer.state.get(param, {}).get(kind)
            if not isinstance(value, jax.Array | UnevenArray):
                new_state.append((param, kind, value))
                continue
            if not isinstance(present, torch.Tensor):
                present = _blank(param, value)
                new_state.append((param, kind, present))
            replacements.append((rank_shard_on(f"{kind}.{name}", present, mesh), present, value))
    _replace(replacements, copy, pads=False)
    for param, kind, value in new_state:
        optimizer.state[param][kind] = value


def _replace(
    replacements: list[tuple[routes.RankShard, torch.Tensor, Any]], copy: bool | None, *, pads: bool
) -> None:
    """Check everything, then change everything."""
    changes, errors = [], []
    taken: set[int] = set()
    for shard, tensor, array in replacements:
        try:
            new = _local_tensor_for(shard, array)
            why = _why_copied(shard, new, taken, pads)
            if copy is False and why:
                raise CopyError(
                    f"{shard.name}: cannot share memory under copy=False: {why}. Pass copy=None or "
                    "copy=True."
                )
            changes.append(_Change(shard, tensor, new, shares=not (copy or why)))
        except ShardingError as error:
            errors.append(error)
    raise_collected(errors)
    for change in changes:
        change.apply()


def _why_copied(shard: routes.RankShard, new: torch.Tensor, taken: set[int], pads: bool) -> str:
    """Why the new local tensor cannot replace the old one without a copy; empty if it can."""
    old = shard.local
    if _start(old) == _start(new):
        return ""
    if old.dtype != new.dtype:
        return f"{old.dtype} is stored as {new.dtype} while jax_enable_x64 is off"
    if new.numel() and _start(new) in taken:
        return "another tensor is given the same memory"
    taken.add(_start(new))
    if pads and not shard.route().layout.is_even:
        return "FSDP2 keeps shards that differ in size padded in memory of its own"
    if not new.is_contiguous():
        return f"the shard is not contiguous (strides {tuple(new.stride())})"
    return ""


def _start(tensor: torch.Tensor) -> int:
    """The address of a tensor's first element, also of an empty tensor."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.itemsize


def _local_tensor_for(shard: routes.RankShard, array: Any) -> torch.Tensor:
    """This process's shard of an array, if that has the shape, dtype and layout of the tensor."""
    if not isinstance(array, jax.Array | UnevenArray):
        raise ShardingError(f"{shard.name} needs a jax.Array, not {type(array).__name__}")
    inner: Any = array
    sizes = None
    if isinstance(array, UnevenArray):
        inner, sizes = array.array, array.sizes
    route = shard.route()
    layout = route.layout
    dtype = device_dtype(numpy_dtype(shard.local.dtype), shard.name)
    if tuple(array.shape) != tuple(shard.shape) or inner.dtype != dtype:
        raise ShardingError(
            f"{shard.name} is {dtype}{list(shard.shape)}, and the array is "
            f"{inner.dtype}{list(array.shape)}; pass one of the same shape and dtype"
        )
    expected = None if layout.is_even else layout.sizes
    alone = inner.sharding.device_set == {route.device}
    fits = sizes == expected and not unreduced(inner.sharding)
    if not fits or not (
        (alone and shard.local.shape == shard.shape)
        or same_layout(inner.sharding, layout.sharding, inner.ndim)
    ):
        raise ShardingError(
            f"{shard.name} is sharded as {layout.sharding.spec} over {layout.sharding.mesh}"
            f"{f', in blocks of {expected}' if expected else ''}, and the array {array!r} as "
            f"{inner.sharding}. Reshard it first: iso.reshard(array, iso.sharding_of(..)) of the "
            "tensor, or fix it with out_shardings= of the jitted step."
        )
    return shard_memory.local_tensor(inner, None if expected is None else route.local)


def _blank(param: torch.Tensor, array: Any) -> torch.Tensor:
    """A zero tensor for new state: like its parameter, or plain."""
    if tuple(array.shape) == tuple(param.shape):
        return torch.zeros_like(param, requires_grad=False)
    return torch.zeros(tuple(array.shape), dtype=torch.float32)


def _pairs(
    arrays: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], owner: str
) -> list[tuple[str, torch.Tensor, Any]]:
    unknown = [name for name in arrays if name not in tensors]
    if unknown:
        shown = ", ".join(list(tensors)[:20]) + (", .." if len(tensors) > 20 else "")
        raise ShardingError(
            f"{owner} has no tensors named {', '.join(unknown)}; its names are {shown}"
        )
    return [(name, tensors[name], array) for name, array in arrays.items()]
