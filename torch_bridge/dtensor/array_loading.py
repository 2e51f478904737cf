"""Loading: JAX arrays become what a module's parameters, or an optimizer's state, are.

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
from .dtensor_modules import held_on, largest_mesh, named_params, reshard
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
            layout of the tensor in whose place it comes. State that the optimizer does not have
            yet is made.
        copy: None puts the arrays' own memory under the tensors and copies where that cannot be,
            False puts it there or raises, True copies into the memory that the tensors have. What
            is shared is the target's from then on: a step of torch writes to it.

    Raises:
        ShardingError: some arrays do not fit; all faults are in one error, nothing is changed.
        CopyError: an array cannot be shared under copy=False: FSDP2 pads parameters whose shards
            differ in size in memory of its own, 64-bit integers are stored as 32-bit ones while
            `jax_enable_x64` is off, and an array that comes twice is one memory.
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
    """A tensor, and the local tensor that comes in its place."""

    held: routes.RankShard
    tensor: torch.Tensor
    new: torch.Tensor
    shares: bool

    def make(self) -> None:
        """Share or copy."""
        old = self.held.local
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
    found = dict(tensors_of(module))
    whole = largest_mesh(found.values(), type(module).__name__)
    fsdp = any(True for _ in fsdp_modules(module))
    pairs = _pairs(tree, found, type(module).__name__)
    _change([(held_on(name, t, whole), t, a) for name, t, a in pairs], copy, pads=fsdp)
    if fsdp:
        module.load_state_dict({}, strict=False)  # its hooks have FSDP2 look at the tensors anew


def _load_optimizer(
    optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], copy: bool | None
) -> None:
    params = named_params(optimizer)
    whole = largest_mesh(params.values(), type(optimizer).__name__)
    known: list[tuple[routes.RankShard, torch.Tensor, Any]] = []
    made: list[tuple[torch.Tensor, str, Any]] = []
    for kind, values in tree.items():
        if not isinstance(values, Mapping):
            raise ShardingError(
                f"{kind} is {type(values).__name__}; an optimizer's state is given as "
                "{kind: {parameter: array}}, as iso.to_jax(optimizer) has it"
            )
        for name, param, value in _pairs(values, params, f"{type(optimizer).__name__} {kind}"):
            present = optimizer.state.get(param, {}).get(kind)
            if not isinstance(value, jax.Array | UnevenArray):
                made.append((param, kind, value))
                continue
            if not isinstance(present, torch.Tensor):
                present = _blank(param, value)
                made.append((param, kind, present))
            known.append((held_on(f"{kind}.{name}", present, whole), present, value))
    _change(known, copy, pads=False)
    for param, kind, value in made:
        optimizer.state[param][kind] = value


def _change(
    wanted: list[tuple[routes.RankShard, torch.Tensor, Any]], copy: bool | None, *, pads: bool
) -> None:
    """Check everything, then change everything."""
    changes, faults = [], []
    taken: set[int] = set()
    for held, tensor, array in wanted:
        try:
            new = _fitting(held, array)
            why = _why_copied(held, new, taken, pads)
            if copy is False and why:
                raise CopyError(
                    f"{held.name}: cannot share memory under copy=False: {why}. Pass copy=None or "
                    "copy=True."
                )
            changes.append(_Change(held, tensor, new, shares=not (copy or why)))
        except ShardingError as error:
            faults.append(error)
    raise_collected(faults)
    for change in changes:
        change.make()


def _why_copied(held: routes.RankShard, new: torch.Tensor, taken: set[int], pads: bool) -> str:
    """Why the new local tensor cannot be put in the place of the old one; empty if it can."""
    old = held.local
    if _start(old) == _start(new):
        return ""
    if old.dtype != new.dtype:
        return f"{old.dtype} is stored as {new.dtype} while jax_enable_x64 is off"
    if new.numel() and _start(new) in taken:
        return "another tensor is given the same memory"
    taken.add(_start(new))
    if pads and not held.route().layout.is_even:
        return "FSDP2 keeps shards that differ in size padded in memory of its own"
    if not new.is_contiguous():
        return f"the shard is not contiguous (strides {tuple(new.stride())})"
    return ""


def _start(tensor: torch.Tensor) -> int:
    """Where a tensor's memory starts, also if none of it is the tensor's."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.itemsize


def _fitting(held: routes.RankShard, array: Any) -> torch.Tensor:
    """This process's shard of an array, if that has the shape, dtype and layout of the tensor."""
    if not isinstance(array, jax.Array | UnevenArray):
        raise ShardingError(f"{held.name} is given {type(array).__name__}, which is no jax.Array")
    inner: Any = array
    sizes = None
    if isinstance(array, UnevenArray):
        inner, sizes = array.array, array.sizes
    route = held.route()
    layout = route.layout
    wanted = device_dtype(numpy_dtype(held.local.dtype), held.name)
    if tuple(array.shape) != tuple(held.shape) or inner.dtype != wanted:
        raise ShardingError(
            f"{held.name} is {wanted}{list(held.shape)}, and is given "
            f"{inner.dtype}{list(array.shape)}; an array of the same shape and dtype must come in "
            "its place"
        )
    expected = None if layout.is_even else layout.sizes
    alone = inner.sharding.device_set == {route.device}
    fits = sizes == expected and not unreduced(inner.sharding)
    if not fits or not (
        (alone and held.local.shape == held.shape)
        or same_layout(inner.sharding, layout.sharding, inner.ndim)
    ):
        raise ShardingError(
            f"{held.name} lies by {layout.sharding.spec} on {layout.sharding.mesh}"
            f"{f', in blocks of {expected}' if expected else ''}; given was {array!r} by "
            f"{inner.sharding}. Lay it out alike first: iso.reshard(array, iso.sharding_of(..)) of "
            "the tensor, or fix it with out_shardings= of the jitted step."
        )
    return shard_memory.local_tensor(inner, None if expected is None else route.local)


def _blank(param: torch.Tensor, array: Any) -> torch.Tensor:
    """A tensor for state that is not there yet: like its parameter, or plain."""
    if tuple(array.shape) == tuple(param.shape):
        return torch.zeros_like(param, requires_grad=False)
    return torch.zeros(tuple(array.shape), dtype=torch.float32)


def _pairs(
    given: Mapping[str, Any], found: Mapping[str, torch.Tensor], owner: str
) -> list[tuple[str, torch.Tensor, Any]]:
    unknown = [name for name in given if name not in found]
    if unknown:
        shown = ", ".join(list(found)[:20]) + (", .." if len(found) > 20 else "")
        raise ShardingError(
            f"{owner} has nothing called {', '.join(unknown)}; its names are {shown}"
        )
    return [(name, found[name], array) for name, array in given.items()]
