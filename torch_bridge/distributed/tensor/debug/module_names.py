"""The modules that ran forward, and their parameters' placements."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor


class Modules:
    """The modules that run between `start` and `stop`, by the name of the outermost and their own.

    A step that is replayed from its capture runs no module.
    """

    def __init__(self):
        """See the class."""
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._ran: dict[str, weakref.ref[torch.nn.Module]] = {}
        self._hook: Any = None

    def start(self) -> None:
        """Clear the list of modules, and start recording."""
        self._names.clear()
        self._ran.clear()
        self._hook = register_module_forward_pre_hook(self._enter)

    def stop(self) -> None:
        """Stop recording."""
        self._hook.remove()

    def parameters(self) -> dict[str, dict[str, torch.Tensor]]:
        """The parameters of each module itself, of those that have any."""
        by_module: dict[str, dict[str, torch.Tensor]] = {
            name: dict[str, torch.Tensor](module.named_parameters(recurse=False))
            for name, reference in self._ran.items()
            if (module := reference()) is not None
        }
        return {name: parameters for name, parameters in by_module.items() if parameters}

    def placements(self) -> dict[str, tuple[Any, ...]]:
        """The placements of these parameters that are sharded."""
        return {
            f"{name}.{key}": tensor.placements
            for name, parameters in self.parameters().items()
            for key, tensor in parameters.items()
            if isinstance(tensor, XLAShardedTensor) and tensor.placements is not None
        }

    def lines(self) -> list[str]:
        """A line for each module, indented by depth, and for each parameter."""
        placed, parameters, lines = self.placements(), self.parameters(), []
        for name, reference in self._ran.items():
            indent = "  " * (name.count(".") + 1)
            lines.append(f"{indent}{name}")
            if (module := reference()) is not None:
                lines.append(f"{indent}*module type: {type(module).__qualname__}")
            lines += [
                f"{indent} *{key}: {placed.get(f'{name}.{key}', 'not sharded')}"
                for key in parameters.get(name, ())
            ]
        return lines

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        if module not in self._names:
            root = type(module).__name__
            for name, submodule in module.named_modules():
                self._names.setdefault(submodule, f"{root}.{name}" if name else root)
        self._ran.setdefault(self._names[module], weakref.ref(module))
