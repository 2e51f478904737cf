"""Torch objects filled with arrays: tensors as new ones, modules and optimizers in place.

A tensor whose mesh and device do not change is written to, so that captured steps and views see the
new values. Otherwise it gets new memory; a parameter remains the same object.

>>> import isoshard as iso
>>> layer = torch.nn.Linear(2, 1, bias=False)
>>> from isoshard.core.frameworks import require
>>> require("torch").filled(layer, {"weight": np.ones((1, 2), np.float32)}).weight
Parameter containing:
tensor([[1., 1.]], requires_grad=True)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.errors import ShardingError
from isoshard.core.layout.spec import same_layout
from isoshard.core.layout.uneven import UnevenArray
from isoshard.torch_bridge.common.dtypes import logical_dtype
from isoshard.torch_bridge.common.exchange import from_numpy
from isoshard.torch_bridge.common.wrapper_tensors import (
    expanded,
    inner_tensors,
    is_wrapper,
    rebuilt,
)
from isoshard.torch_bridge.dtensor import dtensor_modules as dtensor_modules
from isoshard.torch_bridge.dtensor.array_loading import load_arrays
from isoshard.torch_bridge.dtensor.recognition import has_dtensors, is_dtensor
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values.value import Aval, Value
from isoshard.torch_bridge.execution import runtime
from isoshard.torch_bridge.layout.marks import annotated
from isoshard.torch_bridge.loops.stacked import StackedLayers
from isoshard.torch_bridge.modules import modules
from isoshard.torch_bridge.overrides import swap_parameters

from .torch_state import layout_of

_ARRAYS = (jax.Array, np.ndarray, UnevenArray)
_ELSEWHERE = ("jax", "meta")


@dataclasses.dataclass(frozen=True)
class Filler:
    """Fills objects.

    Args:
        place: shards a tensor; see `modules.shard_module`.
    """

    place: modules.Placer

    def fill(self, x: Any, values: Mapping[str, Any]) -> Any:
        """Set the values of an object.

        Args:
            x: a module, an optimizer, or a tensor, also one made of others.
            values: for each of its leaves an array in the tensor's shape (in host memory in its
                dtype), or a number, string, ..; for a tensor one, under "".

        Returns:
            `x`; for a tensor a new one, with the sharding of the array.
        """
        if isinstance(x, torch.nn.Module):
            self._module(x, values)
            return x
        if isinstance(x, torch.optim.Optimizer):
            self._optimizer(x, values)
            return x
        if is_wrapper(x):
            tensors = inner_tensors(x)
            return rebuilt(x, {name: self._new(t, values[name]) for name, t in tensors.items()})
        return self._new(x, values[""])

    def _module(self, module: torch.nn.Module, values: Mapping[str, Any]) -> None:
        if has_dtensors(module):
            load_arrays(module, values)
            return
        tensors = expanded(module.state_dict(keep_vars=True))
        named = dict(modules.tensors(module))
        replaceable = {id(tensor) for tensor in expanded(named).values()}
        arrays = {name: value for name, value in values.items() if isinstance(value, _ARRAYS)}
        moves = {
            name: value for name, value in arrays.items() if not _can_write(tensors[name], value)
        }
        stacks = {
            name: value for name, value in moves.items() if id(tensors[name]) not in replaceable
        }
        moved: dict[int, torch.Tensor] = {}
        for name, value in moves.items():
            old = tensors[name]
            if id(old) in replaceable and id(old) not in moved:
                moved[id(old)] = self._new(old, value)
                if old.grad is not None and not isinstance(value, np.ndarray):
                    grad = self.place(old.grad, _layout(value), None, f"{name}.grad")
                    moved[id(old)].grad = grad
        if stacks:
            self._move_stacks(module, stacks)
        for tensor in filter(is_wrapper, named.values()):
            inner = inner_tensors(tensor)
            if any(id(t) in moved for t in inner.values()):
                components = {name: moved.get(id(t), t) for name, t in inner.items()}
                moved[id(tensor)] = rebuilt(tensor, components)
        _replace(module, moved)
        tensors = expanded(module.state_dict(keep_vars=True))
        in_place = [(tensors[n], v) for n, v in arrays.items() if n not in moves or n in stacks]
        _write(in_place)
        others = {name: value for name, value in values.items() if name not in arrays}
        if others:
            module.load_state_dict(others, strict=False)

    def _move_stacks(self, module: torch.nn.Module, values: Mapping[str, Any]) -> None:
        """Move the stacks of layers; their layers are written to afterwards."""
        for path, child in module.named_modules():
            prefix = f"{path}." if path else ""
            specs = {
                name.removeprefix(prefix): value.sharding.spec
                for name, value in values.items()
                if isinstance(child, StackedLayers) and name.startswith(prefix)
            }
            if not specs:
                continue
            if any(tensor.device.type == "meta" for tensor in child.parameters()):
                raise ShardingError(
                    f'{path or "the module"} has stacked layers on "meta", which cannot be '
                    'filled layer by layer; give them memory first: module.to_empty(device="cpu")'
                )
            if any(isinstance(value, UnevenArray) for value in values.values()):
                raise ShardingError(
                    f"{path or 'the module'} has stacked layers, which are sharded together, and "
                    "these are in blocks of unequal sizes; restore them with even shardings"
                )
            mesh = next(iter(values.values())).sharding.mesh
            modules.shard_module(child, mesh, specs, self.place)

    def _optimizer(self, optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
        params = dtensor_modules.named_params(optimizer)
        shared: dict[str, dict[str, Any]] = {}
        in_place: list[tuple[torch.Tensor, Any]] = []
        values = dict(values)
        for owner, param in params.items():
            state = optimizer.state.get(param, {})
            for key, old in state.items():
                if not is_wrapper(old):
                    continue
                tensors = inner_tensors(old)
                new = {name: values.pop(f"state.{owner}.{key}.{name}") for name in tensors}
                if all(_can_write(t, new[name]) for name, t in tensors.items()):
                    in_place += [(t, new[name]) for name, t in tensors.items()]
                else:
                    state[key] = self.fill(old, new)
        for name, value in values.items():
            start, _, key = name.rpartition(".")
            kind, _, owner = start.partition(".")
            if kind == "param_groups":
                group = optimizer.param_groups[int(owner)]
                array = isinstance(value, _ARRAYS)
                group[key] = self._new(group[key], value) if array else value
                continue
            param = params[owner]
            state = optimizer.state[param]
            old = state.get(key)
            if is_dtensor(param):
                plain = isinstance(value, np.ndarray)  # a new count of steps
                shared.setdefault(key, {})[owner] = self._new(None, value) if plain else value
            elif not isinstance(value, _ARRAYS):
                state[key] = value
            elif isinstance(old, torch.Tensor) and _can_write(old, value):
                in_place.append((old, value))
            else:
                state[key] = self._new(old if isinstance(old, torch.Tensor) else None, value)
        if shared:
            load_arrays(optimizer, shared)
        _write(in_place)

    def _new(self, old: torch.Tensor | None, value: Any) -> torch.Tensor:
        """A tensor of the array, in place of `old`."""
        if old is not None and is_dtensor(old):
            raise ShardingError(
                "a DTensor by itself cannot be filled; restore the module that it is in, or a "
                "jax.Array, and take iso.to_dtensor of that"
            )
        like = torch.empty((), dtype=logical_dtype(value.dtype)) if old is None else old
        if isinstance(value, jax.Array | UnevenArray):
            layout = _layout(value)
            layout = layout if isinstance(layout, NamedSharding | BlockLayout) else None
            return annotated(like, Value.of(value, shared=True), layout, tuple(value.shape))
        tensor = from_numpy(value, like.dtype)
        if like.device.type not in _ELSEWHERE:
            tensor = tensor.to(like.device)
        if isinstance(like, torch.nn.Parameter):
            return torch.nn.Parameter(tensor, requires_grad=like.requires_grad)
        return tensor.requires_grad_(like.requires_grad)


def _can_write(tensor: torch.Tensor, value: Any) -> bool:
    """Whether array and tensor have one device and sharding, so that the tensor can be written."""
    if isinstance(value, np.ndarray):
        return tensor.device.type not in _ELSEWHERE
    if not isinstance(tensor, lazy_tensor.LazyTensor):
        return False
    have, come = layout_of(tensor), _layout(value)
    if have is None:
        return not isinstance(come, NamedSharding | BlockLayout)
    if isinstance(have, BlockLayout) != isinstance(come, BlockLayout):
        return False
    if isinstance(have, BlockLayout):
        return have.is_equivalent_to(come)
    return same_layout(have, come, value.ndim)


def _layout(value: jax.Array | UnevenArray) -> Any:
    return BlockLayout.of(value) if isinstance(value, UnevenArray) else value.sharding


def _write(pairs: list[tuple[torch.Tensor, Any]]) -> None:
    with torch.no_grad():
        for tensor, value in pairs:
            if isinstance(value, np.ndarray):
                tensor.copy_(from_numpy(value, tensor.dtype))
            else:
                aval = Aval.contiguous(tuple(value.shape), tensor.dtype)
                tensor.copy_(
                    lazy_tensor.fresh(aval, Value.of(value, shared=True))
                )  # tied names share it
    if any(isinstance(tensor, lazy_tensor.LazyTensor) for tensor, _ in pairs):
        runtime.sync()


def _replace(module: torch.nn.Module, moved: dict[int, torch.Tensor]) -> None:
    slots = swap_parameters.parameters(module)
    swap_parameters.replace([(slot, moved[id(slot[2])]) for slot in slots if id(slot[2]) in moved])
    for child in module.modules():
        for key, buffer in list(child.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) in moved:
                setattr(child, key, moved[id(buffer)])
