"""Buffers that no file has, computed by the code that would initialize them.

A buffer that is not persistent, such as the frequencies of a rotary embedding, is in no state dict:
the module's constructor computes it. A module constructed on `meta` has only its shape. What
computes it again is the module's own initializer, by the conventions of transformers, torch and
torchtitan, in this order:

1. `_init_weights(module)` of the nearest module around it that has one (transformers, timm),
2. `reset_parameters()` of the module itself (layers of torch; what FSDP calls after `to_empty`),
3. `init_weights()` of the nearest module around it that has one (torchtitan).

They run on a copy of the model in which parameters remain on `meta`, so that no weight is drawn or
stored. A buffer counts as computed if an initializer wrote to it or replaced it.

>>> class Rotary(torch.nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.register_buffer("inv_freq", torch.empty(2), persistent=False)
...         self.reset_parameters()
...     def reset_parameters(self):
...         self.inv_freq.copy_(1 / 100 ** torch.tensor([0.0, 0.5]))
>>> with torch.device("meta"):
...     model = torch.nn.Sequential(Rotary())
>>> initial_buffers(model, ["0.inv_freq"])
({'0.inv_freq': tensor([1.0000, 0.1000])}, {})
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.module_fields import own_buffers
from isoshard.torch_bridge._torch_internals.tensor_fields import writes

_Initializer = tuple[str, Callable[[], Any]]


def initial_buffers(
    module: torch.nn.Module, names: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Compute buffers that are on `meta`.

    Args:
        module: which has them; it is not changed.
        names: of the buffers.

    Returns:
        The buffers on the CPU by name, and for each of the others why there is none.
    """
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    on_meta: dict[int, Any] = {key: _on_meta(tensor) for key, tensor in tensors.items()}
    replica = copy.deepcopy(module, on_meta)
    names_by_owner: dict[str, list[str]] = {}
    for name in names:
        owner, _, key = name.rpartition(".")
        names_by_owner.setdefault(owner, []).append(key)
    computed: dict[str, torch.Tensor] = {}
    reasons: dict[str, str] = {}
    for path, keys in names_by_owner.items():
        prefix = f"{path}." if path else ""
        table = own_buffers(replica.get_submodule(path))
        for key in keys:
            table[key] = torch.empty_like(table[key], device="cpu")
        empty = {key: (table[key], writes(table[key])) for key in keys}
        tried = []
        for what, initialize in _initializers(replica, path):
            tried.append(what)
            try:
                with torch.no_grad():
                    initialize()
            except Exception as error:
                tried[-1] += f" (which raises {type(error).__name__}: {error})"
            for key in [*empty]:
                if _is_written(table.get(key), *empty[key]):
                    computed[f"{prefix}{key}"] = table[key].to(empty[key][0].dtype)
                    del empty[key]
            if not empty:
                break
        for key in empty:
            reasons[f"{prefix}{key}"] = (
                f"not computed by {', '.join(tried)}" if tried else "no initializer computes it"
            )
    return computed, reasons


def _initializers(root: torch.nn.Module, path: str) -> Iterator[_Initializer]:
    """The initializers of a module, and what they are called in messages."""
    module = root.get_submodule(path)
    parts = path.split(".") if path else []
    paths = [".".join(parts[:count]) for count in range(len(parts), -1, -1)]
    around = [root.get_submodule(outer) for outer in paths]
    for outer in around:
        initialize: Any = getattr(outer, "_init_weights", None)
        if callable(initialize):
            yield f"{type(outer).__name__}._init_weights", functools.partial(initialize, module)
            break
    reset: Any = getattr(module, "reset_parameters", None)
    if callable(reset):
        yield f"{type(module).__name__}.reset_parameters", reset
    for outer in around:
        initialize_all: Any = getattr(outer, "init_weights", None)
        if callable(initialize_all):
            yield f"{type(outer).__name__}.init_weights", initialize_all
            break


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, without memory."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _is_written(now: Any, before: torch.Tensor, written: int) -> bool:
    """Whether a buffer was replaced by one with elements, or written to."""
    if not isinstance(now, torch.Tensor) or now.device.type == "meta":
        return False
    return now is not before or writes(now) != written
