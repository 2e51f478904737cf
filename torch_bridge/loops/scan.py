"""`scan_layers`: a stack of identical layers as one loop of the compiled program.

A decoder of 48 layers is recorded, traced and compiled as one layer and a loop, forward, backward
and in the optimizer, so compile time does not depend on the depth:

>>> import torch, isoshard.torch_bridge as xs
>>> layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(8)).to("jax")
>>> blocks = xs.scan_layers(layers)
>>> optimizer = torch.optim.AdamW(blocks.parameters())      # after scan_layers, from the module
>>> x = torch.ones(2, 4, device="jax")
>>> y = blocks(x)                                # instead of: for layer in layers: x = layer(x)
>>> y.sum().backward()
>>> optimizer.step()

One parameter for each name holds all layers; checkpoints are those of the `ModuleList`:

>>> {name: tuple(p.shape) for name, p in blocks.named_parameters()}
{'layers.weight': (8, 4, 4), 'layers.bias': (8, 4)}
>>> list(blocks.state_dict())[:3]
['0.weight', '0.bias', '1.weight']

See `StackedLayers` for what follows from that. `scan_layers(layers, stacked=False)` gives
`ScanLayers`, a `ModuleList` of the same layers with a parameter for each. The program then stacks
them, which costs a copy, and the optimizer's part of it grows with the depth.

Limits: the layers must be identical (same modules, shapes, options and modes) and must return what
they take. The first one's Python code runs once in each call, for all of them, and reads current
values. Each layer draws random numbers of its own, from one key of the stream. Buffers that
layers write to (BatchNorm statistics) get their new values. Double backward raises. On another
device the layers run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from .looped import Looped
from .stacked import StackedLayers


def scan_layers(
    layers: Iterable[torch.nn.Module],
    *,
    checkpoint: bool = False,
    call: Callable[..., Any] | None = None,
    ignore: Collection[str] = (),
    stacked: bool = True,
) -> StackedLayers | ScanLayers:
    """Make a module that runs `layers` one after the other, as one loop.

    The parameters of `layers` are copied into new ones that hold all layers. An optimizer made
    before still holds the old ones, which nothing trains any more: make it afterwards, from the
    module. (One that steps with the old ones raises.)

    Args:
        layers: at least one; a `ModuleList` or `Sequential` of modules that differ only in the
            values of their parameters and buffers.
        checkpoint: keep only each layer's input for backward, and compute the rest again there.
        call: how a layer is called; `call(layer, x, *args, **kwargs)` returns the next `x`. It is
            `layer(x, *args, **kwargs)` if not given.
        ignore: names of attributes that may differ because the layers do not use them in a forward
            pass. An integer or string that differs (such as `layer_idx`) needs no mention where
            `stacked`: it raises if the layers' code uses it.
        stacked: hold one parameter for all layers, see `StackedLayers`; if False, keep the layers
            and their parameters, see `ScanLayers`.

    Returns:
        A module: `module(x, *args, **kwargs)`, where `x` is a tensor or a nesting of tensors that
        goes from layer to layer, and all layers get the same `args` and `kwargs`.

    Raises:
        ValueError: listing every difference between the layers; or, unless `stacked=False`, layers
            share a parameter, are frozen in part, or have gradients, layouts, or state outside
            their tensors that one stack cannot hold.

    Example:
        >>> layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(8)).to("jax")
        >>> blocks = scan_layers(layers)
        >>> blocks(torch.ones(2, 4, device="jax")).shape
        torch.Size([2, 4])
        >>> [tuple(parameter.shape) for parameter in blocks.parameters()]
        [(8, 4, 4), (8, 4)]
    """
    layers = list(layers)
    if not layers:
        raise ValueError("scan_layers needs at least one layer")
    kind = StackedLayers if stacked else ScanLayers
    return kind(layers, checkpoint=checkpoint, call=call, ignore=ignore)


class ScanLayers(Looped, torch.nn.ModuleList):
    """Identical layers that keep their parameters and run as one loop; see `scan_layers`.

    It is a `ModuleList` of the layers it was given: parameters, their names, optimizers and
    checkpoints stay as they are, and some layers may be frozen.

    Args:
        layers: as for `scan_layers`, and so are the others.
        checkpoint: likewise.
        call: likewise.
        ignore: likewise.

    Raises:
        ValueError: listing every difference between the layers.

    Example:
        >>> layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(8)).to("jax")
        >>> blocks = scan_layers(layers, stacked=False)
        >>> blocks(torch.ones(2, 4, device="jax")).sum().backward()
        >>> layers[3].weight.grad.shape
        torch.Size([4, 4])
    """

    _holds_stacks = False

    def __init__(
        self,
        layers: Iterable[torch.nn.Module],
        *,
        checkpoint: bool = False,
        call: Callable[..., Any] | None = None,
        ignore: Collection[str] = (),
    ):
        """See `scan_layers`."""
        torch.nn.ModuleList.__init__(self, layers)
        self._prepare(checkpoint, call, ignore)

    def _layer_modules(self) -> list[torch.nn.Module]:
        self._depth = len(self)
        return list(self)

    def _in_turn(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        for layer in self:
            x = self._call_layer(layer, x, *args, **kwargs)
        return x
