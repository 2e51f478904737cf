"""A module's parameters stay the same objects when they cross to or from the `jax` device.

`module.cuda()` changes the data of each parameter and keeps the object, so that tied weights stay
tied and an optimizer made before still holds the right tensors. torch cannot do so between plain
tensors and wrappers: `Module._apply` would make one new parameter for every place. Here the old
object takes over the new one's content.

>>> import isoshard.torch_bridge
>>> decoder = torch.nn.Linear(4, 8, bias=False)
>>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), decoder)
>>> decoder.weight = model[0].weight
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> model = model.to("jax")
>>> model[0].weight is decoder.weight is optimizer.param_groups[0]["params"][0]
True
>>> decoder.weight.device
device(type='jax', index=0)

Where something else holds the parameter (a graph that will run backward, a weak reference), the new
tensor takes the old one's place instead, in every module that had it.

Touches `torch.nn.Module._apply`, wrapped once when the device is registered; calls that move
nothing to or from `jax` are left as they are. Tested with torch 2.13.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from isoshard.torch_bridge.engine import base

_Place = tuple[dict[str, Any], str, torch.Tensor]


class _Depth(threading.local):
    inside = False


_DEPTH = _Depth()


def register() -> None:
    """Wrap `torch.nn.Module._apply`, the way of `to`, `cpu`, `cuda` and their like."""
    original: Callable[..., Any] = torch.nn.Module._apply

    @functools.wraps(original)
    def _apply(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _DEPTH.inside:
            return original(self, *args, **kwargs)
        places = parameters(self)
        _DEPTH.inside = True
        try:
            result = original(self, *args, **kwargs)
        finally:
            _DEPTH.inside = False
            replace(
                [(place, place[0][place[1]]) for place in places if _crossed(place)],
            )
        return result

    torch.nn.Module._apply = _apply  # pyright: ignore[reportAttributeAccessIssue]


def parameters(module: torch.nn.Module) -> list[_Place]:
    """Every place in a module that holds a parameter: its dictionary, its key and the parameter."""
    return [
        (child._parameters, key, parameter)
        for child in module.modules()
        for key, parameter in child._parameters.items()
        if parameter is not None
    ]


def replace(places: list[tuple[_Place, torch.Tensor]]) -> None:
    """Give parameters new content, each object once, wherever it stands.

    Args:
        places: a place with what the parameter there becomes; equal parameters become the first.
    """
    done: dict[int, torch.Tensor] = {}
    for (own, key, old), new in places:
        if id(old) not in done:
            done[id(old)] = old if _swapped(old, new) else new
        own[key] = done[id(old)]


def _crossed(place: _Place) -> bool:
    own, key, old = place
    new = own[key]
    return new is not old and isinstance(old, base.LazyTensor) != isinstance(new, base.LazyTensor)


def _swapped(old: torch.Tensor, new: torch.Tensor) -> bool:
    hooks, after = old._backward_hooks, old._post_accumulate_grad_hooks
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:  # a graph or a weak reference holds one of the two
        return False
    if hooks:  # C++ keeps what calls them with the memory that was swapped
        old._backward_hooks = hooks
    if after:
        old._post_accumulate_grad_hooks = after
    return True
