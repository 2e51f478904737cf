"""Loaded optimizer state: slots of a parameter's shape are sharded in the parameter's blocks.

Torch moves what it loads to the device of the parameter, and to its dtype. Where a parameter lies
in blocks of unequal sizes, or did when its state was saved, it is laid out as well, so that a
moment does not stay in the blocks of another parameter.

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
from typing import Any

import torch

from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.layout import marks


def register() -> None:
    """Replace the method."""
    optimizer: Any = torch.optim.Optimizer
    optimizer.load_state_dict = _load_state_dict(optimizer.load_state_dict)


def _load_state_dict(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        theirs(self, state_dict)
        for param, state in self.state.items():
            if not isinstance(param, lazy_tensor.LazyTensor) or not isinstance(state, dict):
                continue
            for kind, slot in state.items():
                if isinstance(slot, lazy_tensor.LazyTensor) and slot.shape == param.shape:
                    state[kind] = _resharded(slot, param)

    return load_state_dict


def _resharded(slot: Any, param: Any) -> Any:
    """A slot, or a copy of it in the layout of its parameter where one of them is in blocks."""
    if slot._chain.ops or param._chain.ops:
        return slot
    have, want = (x._storage.value.layout for x in (slot, param))
    in_blocks = any(sharding_ids.blocks(layout_id) is not None for layout_id in (have, want))
    if have == want or want == sharding_ids.UNPLACED or not in_blocks:
        return slot
    if sharding_ids.is_on_host(have) or sharding_ids.is_on_host(want):
        return slot
    with torch.no_grad():
        moved: Any = slot.detach().clone()
    layout: Any = sharding_ids.as_named(want)
    marks.annotate(moved, layout)
    return moved
