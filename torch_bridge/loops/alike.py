"""Layers that are alike: the same modules, options and shapes, with other values.

>>> pair = [torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)]
>>> Stack(pair, ()).names
['weight', 'bias']
>>> Stack([torch.nn.Dropout(0.1), torch.nn.Dropout(0.2)], ())
Traceback (most recent call last):
    ...
ValueError: scanned layers must be alike, but layer 1 differs from layer 0 in: p (0.1 and 0.2)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.module_fields import (
    forward_hooks,
    forward_pre_hooks,
    own_buffers,
    own_modules,
    own_parameters,
)

_SHOWN = 5


class Stack:
    """Layers that one piece of code can stand for.

    Args:
        layers: at least one.
        ignore: names of attributes that may differ.

    Attributes:
        first: the layer whose code is run.
        names: of its parameters and buffers.

    Raises:
        ValueError: listing the differences.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], ignore: Collection[str]):
        """See the class."""
        self.first = layers[0]
        for number, layer in enumerate(layers):
            faults = [*_hooks(layer), *(_differences(self.first, layer, ignore) if number else ())]
            if faults:
                shown = "; ".join(faults[:_SHOWN]) + ("; .." if len(faults) > _SHOWN else "")
                raise ValueError(
                    f"scanned layers must be alike, but layer {number} differs from layer 0 in: "
                    f"{shown}"
                )
        self.names = [name for name, _ in _own(self.first)]
        self._slots = [[_slot(layer, name) for name in self.names] for layer in layers]
        self._modules = [list(layer.modules()) for layer in layers]
        self._links = [
            (own_modules(module), name, child)
            for modules in self._modules
            for module in modules
            for name, child in own_modules(module).items()
        ]
        self._layers = list(layers)
        self._constraints = self._hooked()

    def _hooked(self) -> list[Any]:
        """What the hooks of the first layer do; those of the others do the same."""
        return [
            _alike(hooks)
            for module in self._modules[0]
            for hooks in (forward_pre_hooks(module), forward_hooks(module))
        ]

    def is_current(self, layers: Sequence[torch.nn.Module]) -> bool:
        """Whether no module was replaced, and no hook came or went."""
        return (
            len(layers) == len(self._layers)
            and all(one is other for one, other in zip(layers, self._layers, strict=True))
            and all(holder.get(name) is child for holder, name, child in self._links)
            and self._hooked() == self._constraints
        )

    def tensors(self) -> list[Any]:
        """Parameters and buffers: those of the first layer, the second, .."""
        return [holder[name] for slots in self._slots for holder, name in slots]

    def merged(self, tensors: Sequence[Any]) -> list[Any]:
        """One tensor for each name: the first layer's, or one that requires a gradient.

        Raises:
            ValueError: tensors of one name have different shapes or dtypes.
        """
        width = len(self.names)
        chosen = list(tensors[:width])
        for place, tensor in enumerate(tensors):
            number = place % width
            known = chosen[number]
            if tensor.shape != known.shape or tensor.dtype != known.dtype:
                raise ValueError(
                    f"scanned layers must be alike, but {self.names[number]} is "
                    f"{tuple(known.shape)} {known.dtype} in layer 0 and {tuple(tensor.shape)} "
                    f"{tensor.dtype} in layer {place // width}"
                )
            if tensor.requires_grad and not known.requires_grad:
                chosen[number] = tensor
        return chosen

    def modes(self) -> tuple[bool, ...]:
        """Whether each module of a layer is in training mode.

        Raises:
            ValueError: the layers differ in it.
        """
        first, *others = ([module.training for module in modules] for modules in self._modules)
        for number, other in enumerate(others, 1):
            if other != first:
                raise ValueError(
                    f"scanned layers must be alike, but layer {number} and layer 0 differ in which "
                    "modules are in training mode; call train() or eval() on all of them"
                )
        return tuple(first)


def _own(layer: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*layer.named_parameters(), *layer.named_buffers()]


def _slot(layer: torch.nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, last = name.rpartition(".")
    module = layer.get_submodule(path)
    parameters = own_parameters(module)
    return (parameters if last in parameters else own_buffers(module)), last


def _differences(
    first: torch.nn.Module, other: torch.nn.Module, ignore: Collection[str]
) -> list[str]:
    mine, theirs = dict(first.named_modules()), dict(other.named_modules())
    if list(mine) != list(theirs):
        return ["its modules"]
    faults = []
    for path, one in mine.items():
        two, prefix = theirs[path], f"{path}." if path else ""
        if type(one) is not type(two):
            faults.append(f"{path or 'type'} ({type(one).__name__} and {type(two).__name__})")
        a, b = _options(one), _options(two)
        faults += [
            f"{prefix}{name} ({a.get(name)!r} and {b.get(name)!r})"
            for name in sorted({*a, *b})
            if name not in ignore and not _same(a.get(name), b.get(name))
        ]
        faults += [
            f"{prefix}forward (hooks {when} it that lay out otherwise)"
            for when, hooks_of in (("before", forward_pre_hooks), ("after", forward_hooks))
            if _alike(hooks_of(one)) != _alike(hooks_of(two))
        ]
    a, b = dict(_own(first)), dict(_own(other))
    return faults + [
        f"{name} ({_shape(a.get(name))} and {_shape(b.get(name))})"
        for name in sorted({*a, *b})
        if _shape(a.get(name)) != _shape(b.get(name))
    ]


# A step that is being captured hangs a `zero_grad` of its own onto each module.
_MODULE = frozenset({*vars(torch.nn.Module()), "_isoshard_scanned", "zero_grad"})


def _options(module: torch.nn.Module) -> dict[str, Any]:
    """A module's attributes besides what every module has."""
    return {name: value for name, value in vars(module).items() if name not in _MODULE}


def _same(one: Any, two: Any) -> bool:
    if one is two:
        return True
    if isinstance(one, torch.Tensor) or type(one) is not type(two):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(_same, one, two))
    return bool(one == two)


def _shape(tensor: Any) -> str:
    return "absent" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"


def _hooks(layer: torch.nn.Module) -> list[str]:
    """Hooks run Python code for each layer, and a loop runs it once; unless they say what they do.

    A hook with an attribute `alike` only records operations, and does the same as another whose
    `alike` is equal.
    """
    return [
        f"{f'{path}.' if path else ''}{name} (a hook; the loop would run it once for all layers)"
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if name.endswith("_hooks") and None in _alike(value)
    ]


def _alike(hooks: Any) -> list[Any]:
    return [getattr(hook, "alike", None) for hook in hooks.values()]
