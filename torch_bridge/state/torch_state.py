"""The leaves of torch objects that `iso.save` writes and `iso.restore` fills.

Those of a module are its `state_dict`, by the same names. Those of an optimizer are its state,
`state.<parameter>.<kind>`, and the settings of its groups, `param_groups.<index>.<setting>`;
parameters have their names if the optimizer was created with `model.named_parameters()`, else
their positions.

>>> import isoshard.torch_bridge
>>> layer = torch.nn.Linear(2, 3)
>>> sorted(parts_of(layer, None))
['bias', 'weight']
>>> sgd = torch.optim.SGD(layer.named_parameters(), lr=0.5, momentum=0.9)
>>> parts = parts_of(sgd, {"state.bias.momentum_buffer": Entry((3,), "float32", "float32")})
>>> parts["param_groups.0.lr"].value, parts["state.bias.momentum_buffer"].follows is layer.bias
(0.5, True)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.checkpoint.source import (
    Destination,
    Entry,
    Memory,
    NamedState,
    TargetArray,
    Within,
)
from isoshard.core.errors import ShardingError
from isoshard.core.frameworks import Framework
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.torch_bridge.common.dtypes import physical_dtype
from isoshard.torch_bridge.common.exchange import to_numpy
from isoshard.torch_bridge.common.wrapper_tensors import inner_tensors, is_wrapper
from isoshard.torch_bridge.dtensor import dtensor_exchange as dtensors
from isoshard.torch_bridge.dtensor import dtensor_modules as dtensor_modules
from isoshard.torch_bridge.dtensor import routes
from isoshard.torch_bridge.dtensor.recognition import has_dtensors, is_dtensor
from isoshard.torch_bridge.engine.compiling import input_placement
from isoshard.torch_bridge.engine.operators import reading
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.execution import runtime
from isoshard.torch_bridge.layout.inner_specs import inner_sharding, outer_sharding

_SKIPPED = ("params", "param_names")


class StateVerbs(Framework):
    """The methods for core's checkpoints, on torch objects."""

    def parts(
        self, x: Any, saved: Mapping[str, Entry] | None = None
    ) -> dict[str, NamedState] | None:
        """See `parts_of`."""
        return parts_of(x, saved)

    def target_array(self, x: Any) -> TargetArray:
        """See `target_array`."""
        return target_array(x)

    def stored(self, x: Any) -> tuple[jax.Array | UnevenArray | np.ndarray, str]:
        """See `stored`."""
        return stored(x)


def parts_of(x: Any, saved: Mapping[str, Entry] | None) -> dict[str, NamedState] | None:
    """The state of a module or optimizer, by name; None of a tensor.

    Args:
        x: a module, an optimizer, or a tensor.
        saved: its entries in a checkpoint: state that an optimizer creates at its first step is
            then listed too.
    """
    if isinstance(x, torch.nn.Module):
        if not _is_on_jax(x) and has_dtensors(x):
            return {name: NamedState(array) for name, array in dtensor_modules.to_jax(x).items()}
        return _components(
            {name: NamedState(value) for name, value in x.state_dict(keep_vars=True).items()}
        )
    if isinstance(x, torch.optim.Optimizer):
        return _components(_optimizer_parts(x, saved or {}))
    if is_wrapper(x):
        return {name: NamedState(t, within=w) for name, t, w in _inner("", x)}
    return None


def _components(states: dict[str, NamedState]) -> dict[str, NamedState]:
    """States by name, with the tensors that a wrapper is made of in its place."""
    result: dict[str, NamedState] = {}
    for name, state in states.items():
        if is_wrapper(state.value):
            for key, tensor, within in _inner(name, state.value):
                result[f"{name}.{key}"] = NamedState(tensor, state.follows, within)
        else:
            result[name] = state
    return result


def _inner(name: str, wrapper: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, Within]]:
    """The tensors that a wrapper is made of, with their names in it and shardings."""
    shape = tuple(wrapper.shape)
    for key, tensor in inner_tensors(wrapper).items():
        fit = functools.partial(inner_sharding, outer=shape, inner=tuple(tensor.shape))
        yield key, tensor, Within(name, fit)


def target_array(x: torch.Tensor) -> TargetArray:
    """The array that a tensor is restored from; without a sharding, on JAX's default device."""
    return TargetArray(tuple(x.shape), physical_dtype(x.dtype).name, _place(x), wide=True)


def stored(x: torch.Tensor) -> tuple[jax.Array | UnevenArray | np.ndarray, str]:
    """The elements of a tensor, for reading, and its logical dtype; executes recorded operations.

    They are not copied: the array of a tensor on `jax`, the memory of one on the CPU. A tensor or
    DTensor whose shards differ in size is an `UnevenArray`.

    Raises:
        ShardingError: it is on the device "meta", and has no elements; or it is traced.
        CaptureError: a step is being captured.
    """
    if x.is_meta:
        raise ShardingError(f'a tensor of shape {tuple(x.shape)} on "meta" has no elements to save')
    if not isinstance(x, lazy_tensor.LazyTensor):
        array = dtensors.to_jax(x.detach()) if is_dtensor(x) else to_numpy(x.detach().cpu())
        return array, physical_dtype(x.dtype).name
    recorder().refuse("a checkpoint")
    value = lazy_tensor.read(x)
    if not isinstance(value.array, jax.Array | UnevenArray):
        runtime.sync()
    array = reading.stored_array(x) if x._chain.ops else input_placement.stored_array(value)
    if isinstance(array, Tracer):
        raise ShardingError("a traced tensor has no elements yet; save outside the function")
    return array, x._aval.physical.name


def _is_on_jax(module: torch.nn.Module) -> bool:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return all(isinstance(tensor, lazy_tensor.LazyTensor) for tensor in tensors)


def _optimizer_parts(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Entry]
) -> dict[str, NamedState]:
    params = dtensor_modules.named_params(optimizer)
    arrays: dict[str, Any] = {}
    leaders: Mapping[str, Any] = params
    if any(map(is_dtensor, params.values())):
        arrays = dtensor_modules.state_to_jax(optimizer)
        leaders = _leaders_on_largest_mesh(params)
    states: dict[str, NamedState] = {}
    for name, param in params.items():
        for kind, value in optimizer.state.get(param, {}).items():
            value = arrays.get(kind, {}).get(name, value)
            states[f"state.{name}.{kind}"] = NamedState(value, leaders[name])
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in _SKIPPED:
                states[f"param_groups.{index}.{key}"] = NamedState(value)
    for name, entry in saved.items():  # created at the first step
        start, _, kind = name.rpartition(".")
        leader = leaders.get(start.removeprefix("state."))
        if name not in states and start.startswith("state.") and leader is not None:
            states[name] = NamedState(entry, leader)
    return states


def _leaders_on_largest_mesh(params: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """By name what an optimizer's state is sharded as: its parameter, on the mesh of all."""
    mesh = dtensor_modules.largest_mesh(params.values(), "the optimizer")
    leaders: dict[str, Any] = {}
    for name, param in params.items():
        layout = dtensor_modules.rank_shard_on(name, param, mesh).route().layout
        dtype = physical_dtype(param.dtype).name
        leaders[name] = param
        if layout.is_even:
            shape = tuple(param.shape)
            leaders[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding)
    return leaders


def _place(x: torch.Tensor) -> Destination:
    if is_dtensor(x):
        layout = routes.route_of(x.device_mesh, x.placements, x.shape).layout
        return layout.sharding if layout.is_even else layout
    if is_wrapper(x):
        largest = max(inner_tensors(x).values(), key=torch.Tensor.numel)
        destination = _place(largest)
        if isinstance(destination, NamedSharding):
            return outer_sharding(destination, tuple(x.shape), tuple(largest.shape))
        return destination
    if not isinstance(x, lazy_tensor.LazyTensor):
        return Memory.HOST
    return layout_of(x) or Memory.DEFAULT_DEVICE


def layout_of(tensor: lazy_tensor.LazyTensor) -> sharding_ids.Layout | None:
    """The sharding of a tensor on `jax`; None if a program may still choose it."""
    if not tensor._chain.ops:
        blocks = sharding_ids.blocks(tensor._storage.value.layout)
        layout = tensor._storage.annotation if blocks is None else blocks
        if layout is not None:
            return layout
    array = reading.stored_array(tensor)
    if isinstance(array, UnevenArray):
        return BlockLayout.of(array)
    if isinstance(array.sharding, jax.sharding.SingleDeviceSharding) and not array.committed:
        return None
    return array.sharding
