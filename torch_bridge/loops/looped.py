"""A module that runs identical layers as one loop of the compiled program.

The base class of `ScanLayers`, which keeps the layers, and `StackedLayers`, which keeps one
parameter for all of them. The loop is that of `scanning`. The first layer's Python code runs in
every call, with the tensors of all layers in place of its own, so it reads current values; if it
records the same operations as before, the loop is not compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp
import torch

from isoshard.core.runtime.caches import cached
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recipes import Recipe
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.subprograms import subtrace
from isoshard.torch_bridge.engine.values.value import Aval
from isoshard.torch_bridge.spmd.stacked_shards import ManualLeaves, NoLongerReplicated

from .layer_match import Stack
from .scanning import iterated


class Looped(torch.nn.Module):
    """Layers that run as one loop if their input is on `jax`, and one after the other elsewhere."""

    _depth: int
    _holds_stacks: bool
    _checkpoint: bool
    _call: Callable[..., Any] | None
    _ignore: tuple[str, ...]
    _stack: Stack
    _in_turn: Callable[..., Any]

    def _prepare(self, checkpoint: bool, call: Any, ignore: Collection[str]) -> None:
        self._checkpoint = checkpoint
        self._call = call
        self._ignore = tuple(ignore)
        self._stack = Stack(self._layer_modules(), self._ignore)

    def _layer_modules(self) -> list[torch.nn.Module]:
        """The modules with the parameters."""
        raise NotImplementedError

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `x` through all layers.

        Raises:
            TypeError: a tensor is not on the `jax` device, or a layer does not return what it
                takes.
            ValueError: the layers are no longer identical.
        """
        form = ManualLeaves((x, args, kwargs))
        while True:
            try:
                return self._run(form, *form.stacked((x, args, kwargs)))
            except NoLongerReplicated:  # as inputs of a later layer: trace again
                continue

    def _run(self, form: ManualLeaves, x: Any, args: Any, kwargs: Any) -> Any:
        """See `forward`; manual tensors are stacked."""
        carried = pytree.tree_leaves(x)
        if not any(isinstance(leaf, lazy_tensor.LazyTensor) for leaf in carried):
            return self._in_turn(x, *args, **kwargs)
        stored = self._layer_modules()
        if not self._stack.is_current(stored):
            self._stack = Stack(stored, self._ignore)
        stack = self._stack
        stack.check_modes()
        per_layer, width = stack.tensors(), len(stack.names)
        rest = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        _check_tensors(carried, rest, per_layer)
        stack.check_shapes(per_layer)
        replaced: set[str] = set()

        def layer(carried: Any, of_layer: Any) -> Any:
            tensors = dict(zip(stack.names, map(_writable, of_layer), strict=True))
            firsts = {name: _memory(tensor) for name, tensor in tensors.items()}
            inside = {f"layer.{name}": tensor for name, tensor in tensors.items()}
            call = LayerCall(self._call_layer, stack.first)
            # A buffer that the layer replaces is in `inside` afterwards.
            x = pytree.tree_map(torch.clone, carried)  # a layer may write to it
            first, rest, named = form.unstacked((x, args, kwargs))
            result = form.stacked(torch.func.functional_call(call, inside, (first, *rest), named))
            _check_result(result, carried)
            now = {name: inside[f"layer.{name}"] for name in tensors}
            replaced.update(name for name, tensor in now.items() if tensor is not tensors[name])
            changed = {
                name: tensor
                for name, tensor in now.items()
                if name in replaced or _memory(tensor) is not firsts[name]
            }
            return result, changed

        stacks = per_layer if self._holds_stacks else _stack_tensors(per_layer, width)
        y, changed = iterated(
            layer, x, stacks, self._depth, recompute=self._checkpoint, caller="a scanned layer"
        )
        for name, values in changed.items():
            each = [values] if self._holds_stacks else values.unbind()
            stack.put(name, each, replace=name in replaced)
        return form.unstacked(y)

    def _call_layer(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return layer(*args, **kwargs) if self._call is None else self._call(layer, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Without the `Stack`: a copy makes one of its own layers."""
        return {**self.__dict__, "_stack": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`."""
        super().__setstate__(state)
        self._stack = Stack(self._layer_modules(), self._ignore)


class LayerCall(torch.nn.Module):
    """A layer and how it is called, as one module."""

    def __init__(self, call: Callable[..., Any], layer: torch.nn.Module):
        """Call `layer` as `call(layer, ..)`."""
        super().__init__()
        vars(self)["call"] = call
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See the class."""
        return vars(self)["call"](self.layer, *args, **kwargs)


class _StackTensors(torch.autograd.Function):
    """The tensors of all layers, stacked: one for each name."""

    @staticmethod
    def forward(ctx: Any, width: int, *tensors: Any) -> tuple[Any, ...]:
        depth = len(tensors) // width
        ctx.set_materialize_grads(False)
        ctx.width, ctx.avals = width, [tensor._aval for tensor in tensors]
        stacked = recorder().record(
            _stack_recipe(width, depth), [lazy_tensor.read(tensor) for tensor in tensors]
        )
        stacks = tuple(
            [
                lazy_tensor.fresh(Aval.contiguous((depth, *tensor.shape), tensor.dtype), value)
                for tensor, value in zip(tensors[:width], stacked, strict=True)
            ]
        )
        expected = {n % width for n, want in enumerate(ctx.needs_input_grad[1:]) if want}
        ctx.mark_non_differentiable(*[s for n, s in enumerate(stacks) if n not in expected])
        return stacks

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        positions = [n for n, grad in enumerate(grads) if grad is not None]
        depth = len(ctx.avals) // ctx.width
        values = [lazy_tensor.read(grads[n]) for n in positions]
        result: list[Any] = [None] * len(ctx.avals)
        unstacked: Any = []
        if positions:
            recipe = _unstack_recipe(len(positions), depth)
            unstacked = recorder().record(recipe, values)
        indices = [n + ctx.width * layer for layer in range(depth) for n in positions]
        for index, value in zip(indices, unstacked, strict=True):
            if ctx.needs_input_grad[1 + index]:
                aval = ctx.avals[index]
                result[index] = lazy_tensor.fresh(
                    Aval.contiguous(tuple(aval.meta.size), aval.meta.dtype), value
                )
        return (None, *result)


def _stack_tensors(per_layer: Sequence[Any], width: int) -> tuple[Any, ...]:
    return _StackTensors.apply(width, *subtrace.inside(per_layer)) if per_layer else ()


@cached(256)
def _stack_recipe(width: int, depth: int) -> Recipe:
    """Stacks the tensors of the first layer, the second, .."""

    def run(arrays: Sequence[Any], _scalars: Any, _key: Any) -> list[Any]:
        return [jnp.stack(arrays[index::width]) for index in range(width)]

    return Recipe(f"parameters of {depth} layers", run, width)


@cached(256)
def _unstack_recipe(width: int, depth: int) -> Recipe:
    """Takes stacks apart: those of the first layer, the second, .."""

    def run(arrays: Sequence[Any], _scalars: Any, _key: Any) -> list[Any]:
        return [array[index] for index in range(depth) for array in arrays]

    return Recipe(f"gradients of {depth} layers", run, width * depth)


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that a layer may write to: a copy, unless it requires a gradient."""
    return tensor if tensor.requires_grad else tensor.clone()


def _memory(tensor: Any) -> Any:
    """The value of a tensor's memory now."""
    return tensor._storage.value if isinstance(tensor, lazy_tensor.LazyTensor) else None


def _check_tensors(carried: list[Any], shared: list[Any], per_layer: list[Any]) -> None:
    for name, group in (
        ("x", carried),
        ("an argument", shared),
        ("a parameter or buffer", per_layer),
    ):
        for tensor in group:
            if not isinstance(tensor, lazy_tensor.LazyTensor):
                kind = f"on {tensor.device}" if isinstance(tensor, torch.Tensor) else repr(tensor)
                raise TypeError(
                    f"scan_layers takes tensors on the {naming.current().type} device, but "
                    f"{name} is {kind}; move the "
                    f"layers and their inputs with {naming.moving()}, and pass other values as "
                    "arguments"
                )


def _check_result(result: Any, carry: Any) -> None:
    leaves, returned = pytree.tree_flatten(result)
    expected, structure = pytree.tree_flatten(carry)
    is_on_device = all(isinstance(leaf, lazy_tensor.LazyTensor) for leaf in leaves)
    if returned != structure or not is_on_device:
        texts = _brief(structure), _brief(returned)
    elif [(leaf.shape, leaf.dtype) for leaf in leaves] != [
        (leaf.shape, leaf.dtype) for leaf in expected
    ]:
        texts = _text(expected), _text(leaves)
    else:
        return
    raise TypeError(
        "a scanned layer must return what it takes, as the input of the next layer; this one takes "
        f"{texts[0]} and returns {texts[1]}. Choose what is passed on with "
        "scan_layers(layers, call=lambda layer, x, *args: layer(x, *args)[0])."
    )


def _brief(structure: Any) -> str:
    return "a tensor" if structure.is_leaf() else " ".join(str(structure).split())


def _text(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
