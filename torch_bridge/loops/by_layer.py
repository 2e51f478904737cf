"""Stacked tensors by the names of their layers, for plans that were written for the layers.

>>> from isoshard.torch_bridge.loops.stacked import StackedLayers
>>> model = torch.nn.Sequential(StackedLayers([torch.nn.Linear(4, 8) for _ in range(2)]))
>>> {name: tuple(tensor.shape) for name, tensor in ByLayer(model).tensors.items()}
{'0.0.weight': (8, 4), '0.1.weight': (8, 4), '0.0.bias': (8,), '0.1.bias': (8,)}

The sharding of the layers becomes that of the stack, whose leading axis is not split:

>>> from isoshard import P, make_mesh
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> rows = {name: NamedSharding(mesh, P("y")) for name in ByLayer(model).tensors}
>>> ByLayer(model).stack_shardings(rows)["0.layers.weight"].spec
P(None, 'y')
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from jax.sharding import NamedSharding

from isoshard.core.errors import ShardingError

from .stacked import StackedLayers, with_leading_axes


class ByLayer:
    """The tensors of a module, those of `StackedLayers` layer by layer.

    Args:
        module: on any device.

    Attributes:
        tensors: parameters and buffers by name; for a stacked one the tensor of each layer, by the
            name that it has in the `ModuleList` of the layers.
    """

    def __init__(self, module: torch.nn.Module):
        """See the class."""
        stacks = {
            f"{path}.layers" if path else "layers": len(child)
            for path, child in module.named_modules()
            if isinstance(child, StackedLayers)
        }
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[str, list[str]] = {}
        self._axes: dict[str, int] = {}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            names, axes = _layer_names(name, stacks)
            per_layer = tensor.detach().flatten(0, axes - 1).unbind() if axes else [tensor]
            self.tensors.update(zip(names, per_layer, strict=True))
            self._names[name], self._axes[name] = names, axes

    def stack_shardings(self, shardings: Mapping[str, NamedSharding]) -> dict[str, NamedSharding]:
        """The shardings of the module's tensors, from those of `tensors`.

        Args:
            shardings: of each tensor of `tensors`.

        Returns:
            A sharding for each parameter and buffer of the module, by its own name.

        Raises:
            ShardingError: layers that are stacked have different shardings.
        """
        errors, result = [], {}
        for name, names in self._names.items():
            first = shardings[names[0]]
            other = next((name for name in names if shardings[name].spec != first.spec), None)
            if other is not None:
                errors.append(
                    f"{name} has all layers and one sharding, but {names[0]} is to be "
                    f"{first.spec} and {other} is to be {shardings[other].spec}; give the layers "
                    "one rule, or keep a parameter for each: scan_layers(layers, stacked=False)"
                )
            axes = self._axes[name]
            result[name] = with_leading_axes(first, axes) if axes else first
        if errors:
            raise ShardingError("\n".join(errors))
        return result


def _layer_names(name: str, stacks: Mapping[str, int]) -> tuple[list[str], int]:
    """The names of the layers' tensors, and how many stacks the name leads through."""
    segments = name.split(".")
    choices, axes = [], 0
    for end, segment in enumerate(segments, 1):
        depth = stacks.get(".".join(segments[:end]))
        choices.append([segment] if depth is None else [str(n) for n in range(depth)])
        axes += depth is not None
    return [".".join(choice) for choice in itertools.product(*choices)], axes
