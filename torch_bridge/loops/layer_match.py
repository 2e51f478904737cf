"""Identical layers: the same modules, options and shapes, with other values.

>>> pair = [torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)]
>>> Stack(pair, ()).names
['weight', 'bias']
>>> Stack([torch.nn.Dropout(0.1), torch.nn.Dropout(0.2)], ())    # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
ValueError: scanned layers must be identical, but layer 1 differs from layer 0 in: p (0.1 and 0.2); ...
"""  # noqa: E501

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch

from isoshard.core.runtime.exact_keys import exact
from isoshard.torch_bridge._torch_internals.module_fields import (
    forward_hooks,
    forward_pre_hooks,
    own_buffers,
    own_modules,
    own_parameters,
)

from .per_layer_values import ALTERNATIVE, PerLayerValue, is_deferred

_SHOWN = 5


class Stack:
    """Layers that can run by the code of the first.

    Args:
        layers: at least one.
        ignore: names of attributes that may differ.
        deferred: accept integers and strings that differ.

    Attributes:
        first: the layer whose code is run.
        names: of its parameters and buffers.
        differing: what stands for those in the layer that is run, by path of the module and name.

    Raises:
        ValueError: listing the differences.
    """

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        ignore: Collection[str],
        *,
        deferred: bool = False,
    ):
        """See the class."""
        self.first = layers[0]
        self.differing = _deferred(layers, ignore) if deferred else {}
        for index, layer in enumerate(layers):
            compared = _differences(self.first, layer, ignore, self.differing) if index else ()
            errors = [*_hooks(layer), *compared]
            if errors:
                shown = "; ".join(errors[:_SHOWN]) + ("; .." if len(errors) > _SHOWN else "")
                raise ValueError(
                    f"scanned layers must be identical, but layer {index} differs from layer 0 in: "
                    f"{shown}; make them equal, or {ALTERNATIVE}"
                )
        self.names = [name for name, _ in _named_tensors(self.first)]
        self._slots = [[_slot(layer, name) for name in self.names] for layer in layers]
        self._modules = [list(layer.modules()) for layer in layers]
        self._links = [
            (own_modules(module), name, child)
            for modules in self._modules
            for module in modules
            for name, child in own_modules(module).items()
        ]
        self._layers = list(layers)
        self._hooks = self._hooked()
        self._tables = [
            table(module)
            for modules in self._modules
            for module in modules
            for table in (vars, own_parameters, own_buffers, own_modules)
        ]
        self._sizes = list(map(len, self._tables))
        self._ties = self._tied()
        self._options = [
            (
                operator.itemgetter(*keys, *keys[:1]),
                vars(module),
                [vars(other) for other in theirs],
            )
            for module, *theirs in zip(*self._modules, strict=True)
            if (keys := [key for key in _plain_attributes(module) if key not in ignore])
        ]

    def _hooked(self) -> list[Any]:
        """The keys of the first layer's hooks, which those of the others equal."""
        return [
            _constraint_keys(hooks)
            for module in self._modules[0]
            for hooks in (forward_pre_hooks(module), forward_hooks(module))
        ]

    def _tied(self) -> list[list[int]]:
        """For each parameter and buffer of each layer, the first that is the same tensor."""
        tied = []
        for modules in self._modules:
            firsts: dict[int, int] = {}
            tensors = [
                tensor
                for module in modules
                for table in (own_parameters(module), own_buffers(module))
                for tensor in table.values()
            ]
            tied.append([firsts.setdefault(id(tensor), n) for n, tensor in enumerate(tensors)])
        return tied

    def _has_same_options(self) -> bool:
        """Whether the options of all layers are those of the first one."""
        try:
            return all(
                all(map(operator.is_, get(theirs), expected)) or _same(get(theirs), expected)
                for get, options, others in self._options
                if (expected := get(options))
                for theirs in others
            )
        except (KeyError, RuntimeError, TypeError, ValueError):  # arrays among them
            return False

    def is_current(self, layers: Sequence[torch.nn.Module]) -> bool:
        """Whether modules, tensors, ties and hooks are unchanged, and options equal."""
        return (
            len(layers) == len(self._layers)
            and all(layer is other for layer, other in zip(layers, self._layers, strict=True))
            and all(table.get(name) is child for table, name, child in self._links)
            and list(map(len, self._tables)) == self._sizes
            and self._tied() == self._ties
            and self._hooked() == self._hooks
            and self._has_same_options()
        )

    def tensors(self) -> list[Any]:
        """Parameters and buffers: those of the first layer, the second, .."""
        return [table[name] for slots in self._slots for table, name in slots]

    def put(self, name: str, values: Sequence[torch.Tensor], *, replace: bool) -> None:
        """Set a buffer of every layer to its new value."""
        index = self.names.index(name)
        for slots, value in zip(self._slots, values, strict=True):
            table, key = slots[index]
            if replace:
                table[key] = value
            else:
                with torch.no_grad():
                    table[key].copy_(value)

    def check_shapes(self, tensors: Sequence[Any]) -> None:
        """Compare what `tensors` gives.

        Raises:
            ValueError: tensors of one name have different shapes or dtypes.
        """
        width = len(self.names)
        for index, tensor in enumerate(tensors):
            existing = tensors[index % width]
            if tensor.shape != existing.shape or tensor.dtype != existing.dtype:
                raise ValueError(
                    f"scanned layers must be identical, but {self.names[index % width]} is "
                    f"{tuple(existing.shape)} {existing.dtype} in layer 0 and "
                    f"{tuple(tensor.shape)} {tensor.dtype} in layer {index // width}"
                )

    def check_modes(self) -> None:
        """Compare which modules are in training mode.

        Raises:
            ValueError: the layers differ in it.
        """
        first, *others = ([module.training for module in modules] for modules in self._modules)
        for index, other in enumerate(others, 1):
            if other != first:
                raise ValueError(
                    f"scanned layers must be identical, but layer {index} and layer 0 differ in "
                    "which modules are in training mode; call train() or eval() on all of them"
                )


def _named_tensors(layer: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*layer.named_parameters(), *layer.named_buffers()]


def _slot(layer: torch.nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, last = name.rpartition(".")
    module = layer.get_submodule(path)
    parameters = own_parameters(module)
    return (parameters if last in parameters else own_buffers(module)), last


def _deferred(
    layers: Sequence[torch.nn.Module], ignore: Collection[str]
) -> dict[tuple[str, str], PerLayerValue]:
    """The attributes that differ and may be of no use, by path of the module and name."""
    trees = [dict(layer.named_modules()) for layer in layers]
    deferred = {}
    for path, module in trees[0].items():
        options = [_plain_attributes(tree[path]) for tree in trees if path in tree]
        for name in _plain_attributes(module) if len(options) == len(layers) else ():
            values = [their.get(name) for their in options]
            differing = [value for value in values if not _same(value, values[0])]
            if (
                name not in ignore
                and differing
                and all(is_deferred(values[0], value) for value in values)
            ):
                full = f"{path}.{name}" if path else name
                deferred[path, name] = PerLayerValue(full, tuple(values))
    return deferred


def _differences(
    first: torch.nn.Module,
    other: torch.nn.Module,
    ignore: Collection[str],
    deferred: Collection[tuple[str, str]],
) -> list[str]:
    modules, others = dict(first.named_modules()), dict(other.named_modules())
    if list(modules) != list(others):
        return ["its modules"]
    errors = []
    for path, module in modules.items():
        other_module, prefix = others[path], f"{path}." if path else ""
        if _kind(module) != _kind(other_module):
            kinds = f"{type(module).__name__} and {type(other_module).__name__}"
            errors.append(f"{path or 'type'} ({kinds})")
        a, b = _options(module), _options(other_module)
        errors += [
            f"{prefix}{name} ({a.get(name)!r} and {b.get(name)!r})"
            for name in sorted({*a, *b})
            if name not in ignore
            and (path, name) not in deferred
            and not _same(a.get(name), b.get(name))
        ]
        errors += [
            f"{prefix}forward (hooks {when} it with other constraints)"
            for when, hooks_of in (("before", forward_pre_hooks), ("after", forward_hooks))
            if _constraint_keys(hooks_of(module)) != _constraint_keys(hooks_of(other_module))
        ]
    a, b = dict(_named_tensors(first)), dict(_named_tensors(other))
    return errors + [
        f"{name} ({_shape(a.get(name))} and {_shape(b.get(name))})"
        for name in sorted({*a, *b})
        if _shape(a.get(name)) != _shape(b.get(name))
    ]


# A step that is being captured sets a `zero_grad` of its own on each module.
_MODULE = frozenset({*vars(torch.nn.Module()), "_isoshard_scanned", "zero_grad"})


def _kind(module: torch.nn.Module) -> Any:
    """The class of a module; if it is parametrized, the bases of its own class."""
    parametrized = torch.nn.utils.parametrize.is_parametrized(module)
    return type(module).__bases__ if parametrized else type(module)


def _options(module: torch.nn.Module) -> dict[str, Any]:
    """A module's attributes besides those of every module; of bound methods the functions."""
    options = {
        name: getattr(value, "__func__", value)
        for name, value in vars(module).items()
        if name not in _MODULE and _is_bound_method(module, value)
    }
    return {**_plain_attributes(module), **options}


def _plain_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """A module's attributes besides those of every module, without bound methods."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _MODULE and not _is_bound_method(module, value)
    }


def _is_bound_method(module: torch.nn.Module, value: Any) -> bool:
    """Whether an attribute is a method of the module, such as a `forward` put in its place."""
    return getattr(value, "__self__", None) is module


def _same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if isinstance(value, torch.Tensor) or type(value) is not type(other):
        return False
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, dict):
        return list(value) == list(other) and all(map(_same, value.values(), other.values()))
    if isinstance(value, float | complex):
        return exact(value) == exact(other)
    return bool(value == other)


def _shape(tensor: Any) -> str:
    return "absent" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"


def _hooks(layer: torch.nn.Module) -> list[str]:
    """The hooks of a layer that a loop cannot run: it calls Python code once for all layers.

    A hook with an attribute `constraint_key` only records operations, and is the same as another
    with an equal key.
    """
    return [
        f"{f'{path}.' if path else ''}{name} (a hook; the loop would run it once for all layers)"
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if name.endswith("_hooks") and None in _constraint_keys(value)
    ]


def _constraint_keys(hooks: Any) -> list[Any]:
    return [getattr(hook, "constraint_key", None) for hook in hooks.values()]
