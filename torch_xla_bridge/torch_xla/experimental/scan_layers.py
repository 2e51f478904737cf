"""A stack of identical layers as one loop, called as torch_xla calls it.

>>> import torch, isoshard.torch_bridge
>>> layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(8)).to("jax")
>>> y = scan_layers(layers, torch.ones(2, 4, device="jax"))
>>> y.sum().backward()
>>> layers[3].weight.grad.shape
torch.Size([4, 4])

`isoshard.torch_bridge.scan_layers(layers)` makes a module instead, whose parameters can be held as
stacks: then the program need not stack them, and the optimizer's part of it is one layer's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from isoshard.torch_bridge.kit import ScanLayers

from .scan import recomputes

__all__ = ["scan_layers"]


def scan_layers(
    layers: Iterable[torch.nn.Module],
    input_data: Any,
    partition_fn: Any = None,
    is_layer_pure: bool = False,
) -> Any:
    """Run layers one after the other, as one loop.

    Args:
        layers: modules that differ only in the values of their parameters and buffers. They keep
            them, and gradients go to them.
        input_data: what the first layer takes, a tensor or a nesting of tensors (the members of a
            tuple are separate arguments). Each layer returns what the next one takes.
        partition_fn: see `scan`.
        is_layer_pure: does nothing: the first layer's Python code runs once in every call, for all
            layers, and the loop is compiled once for the same operations.

    Returns:
        What the last layer returns; `input_data` if there are no layers.

    Raises:
        ValueError: the layers are not alike; every difference is listed.
        TypeError: a layer does not return what it takes.
    """
    every = list(layers)
    recompute = recomputes(partition_fn)
    if not every:
        return input_data
    stacks = vars(every[0]).setdefault("_isoshard_scanned", _Stacks()).stacks
    key = (recompute, *map(id, every))
    if key not in stacks:
        stacks.clear()
        stacks[key] = ScanLayers(every, checkpoint=recompute, call=_call)
    return stacks[key](input_data)


def _call(layer: torch.nn.Module, x: Any) -> Any:
    return layer(*x) if isinstance(x, tuple) else layer(x)


class _Stacks:
    """The stack that a layer is the first of; copies of the layer begin with none."""

    def __init__(self) -> None:
        self.stacks: dict[Any, ScanLayers] = {}

    def __deepcopy__(self, memo: Any) -> _Stacks:
        return _Stacks()

    def __reduce__(self) -> Any:
        return _Stacks, ()
