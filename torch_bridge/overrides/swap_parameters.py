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

Where something else refers to the parameter (a graph, a weak reference), the new tensor replaces
the old one instead, in every module that had it.

`torch.nn.Module._apply` is wrapped once, when the device is registered; calls that move
nothing to or from `jax` are left as they are.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.module_fields import APPLY, own_parameters
from isoshard.torch_bridge._torch_internals.tensor_fields import all_hooks, put_hooks
from isoshard.torch_bridge.engine.recording import lazy_tensor

ParameterEntry = tuple[dict[str, Any], str, torch.Tensor]


class _Depth(threading.local):
    inside = False


_DEPTH = _Depth()


def register() -> None:
    """Wrap `Module._apply`, which `to`, `cpu` and `cuda` call."""
    own_parameters(torch.nn.Module())  # what raises does so here, and not in every `module.to(..)`
    APPLY.wrap(_keeping)


def _keeping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _apply(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _DEPTH.inside:
            return original(self, *args, **kwargs)
        entries = parameters(self)
        _DEPTH.inside = True
        try:
            result = original(self, *args, **kwargs)
        finally:
            _DEPTH.inside = False
            replace(
                [(entry, entry[0][entry[1]]) for entry in entries if _crossed(entry)],
            )
        return result

    return _apply


def parameters(module: torch.nn.Module) -> list[ParameterEntry]:
    """The parameters of a module, each as its dictionary, its key and the parameter."""
    return [
        (fields, key, parameter)
        for child in module.modules()
        for fields in (own_parameters(child),)
        for key, parameter in fields.items()
        if parameter is not None
    ]


def replace(replacements: list[tuple[ParameterEntry, torch.Tensor]]) -> None:
    """Replace the contents of parameters, each object once.

    Args:
        replacements: entries of `parameters` with their new tensors; of equal parameters the first
            counts.
    """
    done: dict[int, torch.Tensor] = {}
    for (fields, key, old), new in replacements:
        if id(old) not in done:
            done[id(old)] = old if _swapped(old, new) else new
        fields[key] = done[id(old)]


def _crossed(entry: ParameterEntry) -> bool:
    fields, key, old = entry
    new = fields[key]
    return new is not old and isinstance(old, lazy_tensor.LazyTensor) != isinstance(
        new, lazy_tensor.LazyTensor
    )


def _swapped(old: torch.Tensor, new: torch.Tensor) -> bool:
    hooks = all_hooks(old)
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:  # a graph or a weak reference refers to one of the two
        return False
    if any(hooks):
        put_hooks(old, hooks)
    return True
