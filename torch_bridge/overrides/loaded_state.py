"""Loaded optimizer state: in the tensors, and the shardings, of the state that it replaces.

Torch's `load_state_dict` gives an optimizer new tensors, dictionaries and groups. A step of
`xs.compile` and a program that was compiled for a lazy loop are for those that were there, in their
shardings, so both would be compiled anew after every resume. For parameters on the device the
loaded elements are written to the earlier tensors, as `Module.load_state_dict` writes to
parameters:

>>> weight = torch.nn.Parameter(torch.ones(4, device="jax"))
>>> optimizer = torch.optim.AdamW([weight])
>>> weight.sum().backward(); optimizer.step()
>>> moment = optimizer.state[weight]["exp_avg"]
>>> saved = optimizer.state_dict()
>>> optimizer.step()
>>> optimizer.load_state_dict(saved)
>>> optimizer.state[weight]["exp_avg"] is moment
True

What `state_dict` returned earlier keeps its elements, as in torch: it has tensors of its own over
the same memory, which part from the optimizer's when other elements are loaded.

Where there was no state, a slot of a parameter's shape is sharded as the parameter. One in blocks
of unequal sizes, or that was when it was saved, is moved to the blocks of its parameter:

>>> import isoshard as iso
>>> mesh = iso.make_mesh((4,), ("x",))
>>> def made(sizes):
...     weight = iso.shard(torch.ones(18, 6), mesh, iso.P("x"), uneven="pad", sizes=sizes)
...     weight = torch.nn.Parameter(weight)
...     return weight, torch.optim.SGD([weight], lr=0.1, momentum=0.9)
>>> (before, old), (after, new) = made((5, 2, 7, 4)), made((0, 3, 9, 6))
>>> before.sum().backward(); old.step()
>>> new.load_state_dict(old.state_dict())
>>> new.state[after]["momentum_buffer"].block_sizes
((0, 3, 9, 6), None)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from isoshard.core.runtime.private_names import or_absent
from isoshard.torch_bridge._torch_internals.undocumented import WeakIdKeyDictionary
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recorder import materialize
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.layout import marks

_ALIASES: Any = or_absent(WeakIdKeyDictionary)
"""Of a tensor of an optimizer, weakly, the tensors that `state_dict` returned for it."""


def register() -> None:
    """Replace the methods."""
    optimizer: Any = torch.optim.Optimizer
    optimizer.load_state_dict = _load_state_dict(optimizer.load_state_dict)
    optimizer.state_dict = _state_dict(optimizer.state_dict)


def _is_on_device(optimizer: torch.optim.Optimizer) -> bool:
    return any(
        isinstance(param, lazy_tensor.LazyTensor)
        for group in optimizer.param_groups
        for param in group["params"]
    )


def _state_dict(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def state_dict(self: Any) -> dict[str, Any]:
        packed = theirs(self)
        if not _is_on_device(self):
            return packed
        state = {
            key: _with_aliases(slots) if isinstance(slots, dict) else slots
            for key, slots in packed["state"].items()
        }
        groups = [_with_aliases(group) for group in packed["param_groups"]]
        return {**packed, "state": state, "param_groups": groups}

    return state_dict


def _with_aliases(values: dict[Any, Any]) -> dict[Any, Any]:
    """The same values, of tensors others over the same memory."""
    return {
        key: _alias(value) if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    alias = tensor.detach()
    aliases = [ref for ref in _ALIASES.get(tensor, ()) if ref() is not None]
    _ALIASES[tensor] = [*aliases, weakref.ref(alias)]
    return alias


def _load_state_dict(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        before, groups = self.state, self.param_groups
        theirs(self, state_dict)
        if not _is_on_device(self) or self.state is before:
            return
        memory = _memory(before)
        state = {
            param: _merged(before.get(param), slots, functools.partial(_loaded, param, memory))
            if isinstance(slots, dict)
            else slots
            for param, slots in self.state.items()
        }
        before.clear()
        before.update(state)
        self.state = before
        for group, new in zip(groups, self.param_groups, strict=True):
            _merged(group, new, functools.partial(_loaded, None, memory))
        self.param_groups = groups

    return load_state_dict


def _merged(old: Any, new: dict[Any, Any], loaded: Callable[[Any, Any], Any]) -> dict[Any, Any]:
    """The earlier dictionary with new values; the new one if there was none."""
    old = {} if old is None else old
    if not isinstance(old, dict):
        return new
    for key in [key for key in old if key not in new]:
        del old[key]
    for key, value in new.items():
        value = loaded(old.get(key), value)
        if key not in old or value is not old[key]:
            old[key] = value
    return old


def _loaded(param: Any, memory: dict[int, int], old: Any, new: Any) -> Any:
    """What replaces a value of an optimizer.

    Args:
        param: the parameter that it is of, if any.
        memory: see `_memory`.
        old: the earlier value, or None.
        new: what was loaded.
    """
    if not isinstance(new, torch.Tensor):
        return old if type(old) is type(new) and _is_equal(old, new) else new
    if old is new:
        return old
    if _can_write(old, new) and memory.get(_memory_of(old)) != 2:
        _write(old, new)
        return old
    is_slot = isinstance(param, lazy_tensor.LazyTensor) and isinstance(new, lazy_tensor.LazyTensor)
    return _resharded(new, param) if is_slot and new.shape == param.shape else new


def _is_equal(old: Any, new: Any) -> bool:
    return isinstance(new, bool | int | float | str | tuple | type(None)) and old == new


def _memory(state: dict[Any, Any]) -> dict[int, int]:
    """How many slots there are of each storage, 2 standing for several."""
    counts: dict[int, int] = {}
    for slots in state.values():
        for slot in slots.values() if isinstance(slots, dict) else ():
            if isinstance(slot, torch.Tensor):
                key = _memory_of(slot)
                counts[key] = min(counts.get(key, 0) + 1, 2)
    return counts


def _memory_of(tensor: Any) -> int:
    lazy = isinstance(tensor, lazy_tensor.LazyTensor)
    return id(tensor._storage if lazy else tensor)


def _can_write(old: Any, new: torch.Tensor) -> bool:
    """Whether an earlier tensor can have the elements of a loaded one."""
    if not isinstance(old, torch.Tensor) or old.dtype != new.dtype or old.shape != new.shape:
        return False
    if old.requires_grad or new.requires_grad:
        return False
    if isinstance(old, lazy_tensor.LazyTensor):
        return isinstance(new, lazy_tensor.LazyTensor) and not old._chain.ops
    plain = type(old) is torch.Tensor and type(new) is torch.Tensor
    return plain and old.device.type == new.device.type == "cpu" and old.layout is new.layout


def _write(old: Any, new: Any) -> None:
    """Write elements to a tensor whose sharding is kept; its aliases keep theirs."""
    with torch.no_grad():
        if not isinstance(old, lazy_tensor.LazyTensor):
            elements = new.clone()
            for alias in _taken_aliases(old):
                if alias.data_ptr() == old.data_ptr():
                    alias.data = alias.clone()
            old.copy_(elements)
            return
        if old._storage is new._storage and not new._chain.ops:
            return  # what state_dict() returned, and nothing was loaded since
        value = lazy_tensor.read(new)
        for alias in _taken_aliases(old):
            if alias._storage is old._storage:
                kept = lazy_tensor.fresh(alias._aval, lazy_tensor.read(alias))
                lazy_tensor.adopt(alias, kept)
        layout = old._storage.value.layout
        lazy_tensor.write(old, value)
        if layout not in (sharding_ids.UNPLACED, old._storage.value.layout):
            materialize([value])
            lazy_tensor.move(old, layout)


def _taken_aliases(tensor: torch.Tensor) -> list[Any]:
    refs = _ALIASES.pop(tensor, ())
    return [alias for ref in refs if (alias := ref()) is not None]


def _resharded(slot: Any, param: Any) -> Any:
    """A slot in the sharding of its parameter, where it has none or one of them is in blocks."""
    if slot._chain.ops or param._chain.ops:
        return slot
    have, want = (x._storage.value.layout for x in (slot, param))
    if have == want or want == sharding_ids.UNPLACED:
        return slot
    if sharding_ids.is_on_host(have) or sharding_ids.is_on_host(want):
        return slot
    in_blocks = any(sharding_ids.blocks(layout_id) is not None for layout_id in (have, want))
    if in_blocks:
        with torch.no_grad():
            moved: Any = slot.detach().clone()
        layout: Any = sharding_ids.as_named(want)
        marks.annotate(moved, layout)
        return moved
    if have == sharding_ids.UNPLACED:
        value = lazy_tensor.read(slot)
        materialize([value])
        own = lazy_tensor.fresh(slot._aval, value)
        lazy_tensor.move(own, want)
        return own
    return slot
