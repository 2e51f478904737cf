"""A module that runs identical layers as one loop of the compiled program.

What both forms of scanned layers share: `ScanLayers`, which keeps the layers, and `StackedLayers`,
which keeps one parameter for all of them. The loop is `scanning`'s. The first layer's Python code
runs in every call, with the tensors of all layers in place of its own, so what it reads is what is
there now; where it gives the same operations as before, the same loop of the program serves.
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
from isoshard.torch_bridge.spmd.stacked_shards import LessAlike, ManualLeaves

from .layer_match import Stack
from .scanning import iterated


class Looped(torch.nn.Module):
    """Layers that run as one loop where their input is on `jax`, and in turn elsewhere."""

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
        self._stack = Stack(self._held(), self._ignore)

    def _held(self) -> list[torch.nn.Module]:
        """The modules that hold the parameters."""
        raise NotImplementedError

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `x` through all layers.

        Raises:
            TypeError: a tensor is not on the `jax` device, or a layer does not return what it
                takes.
            ValueError: the layers are not alike any more.
        """
        form = ManualLeaves((x, args, kwargs))
        while True:
            try:
                return self._run(form, *form.stacked((x, args, kwargs)))
            except LessAlike:  # another layer gets them otherwise than the first: once more
                continue

    def _run(self, form: ManualLeaves, x: Any, args: Any, kwargs: Any) -> Any:
        """See `forward`; pieces come stacked."""
        carried = pytree.tree_leaves(x)
        if not any(isinstance(leaf, lazy_tensor.LazyTensor) for leaf in carried):
            return self._in_turn(x, *args, **kwargs)
        stored = self._held()
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

        def layer(carried: Any, own: Any) -> Any:
            given = dict(zip(stack.names, map(_apart, own), strict=True))
            firsts = {name: _memory(tensor) for name, tensor in given.items()}
            inside = {f"layer.{name}": tensor for name, tensor in given.items()}
            one = OneLayer(self._one, stack.first)
            # What the layer puts in the place of a buffer is in `inside` afterwards.
            x = pytree.tree_map(torch.clone, carried)  # a layer may write to it
            first, rest, named = form.pieces((x, args, kwargs))
            result = form.stacked(torch.func.functional_call(one, inside, (first, *rest), named))
            _check_result(result, carried)
            now = {name: inside[f"layer.{name}"] for name in given}
            replaced.update(name for name, tensor in now.items() if tensor is not given[name])
            changed = {
                name: tensor
                for name, tensor in now.items()
                if name in replaced or _memory(tensor) is not firsts[name]
            }
            return result, changed

        stacks = per_layer if self._holds_stacks else _together(per_layer, width)
        y, changed = iterated(
            layer, x, stacks, self._depth, recompute=self._checkpoint, what="a scanned layer"
        )
        for name, values in changed.items():
            each = [values] if self._holds_stacks else values.unbind()
            stack.put(name, each, replace=name in replaced)
        return form.pieces(y)

    def _one(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return layer(*args, **kwargs) if self._call is None else self._call(layer, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Copies look at their own layers."""
        return {**self.__dict__, "_stack": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`."""
        super().__setstate__(state)
        self._stack = Stack(self._held(), self._ignore)


class OneLayer(torch.nn.Module):
    """A layer and how it is called, as one module."""

    def __init__(self, call: Callable[..., Any], layer: torch.nn.Module):
        """Call `layer` as `call(layer, ..)`."""
        super().__init__()
        vars(self)["call"] = call
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See the class."""
        return vars(self)["call"](self.layer, *args, **kwargs)


class _Together(torch.autograd.Function):
    """The tensors of all layers, stacked: one for each name."""

    @staticmethod
    def forward(ctx: Any, width: int, *own: Any) -> tuple[Any, ...]:
        depth = len(own) // width
        ctx.set_materialize_grads(False)
        ctx.width, ctx.avals = width, [one._aval for one in own]
        found = recorder().record(
            _together_recipe(width, depth), [lazy_tensor.read(one) for one in own]
        )
        stacks = tuple(
            [
                lazy_tensor.fresh(Aval.contiguous((depth, *one.shape), one.dtype), value)
                for one, value in zip(own[:width], found, strict=True)
            ]
        )
        expected = {n % width for n, want in enumerate(ctx.needs_input_grad[1:]) if want}
        ctx.mark_non_differentiable(*[s for n, s in enumerate(stacks) if n not in expected])
        return stacks

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        positions = [n for n, grad in enumerate(grads) if grad is not None]
        depth = len(ctx.avals) // ctx.width
        given = [lazy_tensor.read(grads[n]) for n in positions]
        result: list[Any] = [None] * len(ctx.avals)
        found = recorder().record(_apart_recipe(len(positions), depth), given) if positions else []
        indices = [n + ctx.width * layer for layer in range(depth) for n in positions]
        for index, value in zip(indices, found, strict=True):
            if ctx.needs_input_grad[1 + index]:
                aval = ctx.avals[index]
                result[index] = lazy_tensor.fresh(
                    Aval.contiguous(tuple(aval.meta.size), aval.meta.dtype), value
                )
        return (None, *result)


def _together(per_layer: Sequence[Any], width: int) -> tuple[Any, ...]:
    return _Together.apply(width, *subtrace.inside(per_layer)) if per_layer else ()


@cached(256)
def _together_recipe(width: int, depth: int) -> Recipe:
    """Stacks the tensors of the first layer, the second, .."""

    def run(arrays: Sequence[Any], _scalars: Any, _key: Any) -> list[Any]:
        return [jnp.stack(arrays[index::width]) for index in range(width)]

    return Recipe(f"parameters of {depth} layers", run, width)


@cached(256)
def _apart_recipe(width: int, depth: int) -> Recipe:
    """Takes stacks apart: those of the first layer, the second, .."""

    def run(arrays: Sequence[Any], _scalars: Any, _key: Any) -> list[Any]:
        return [array[index] for index in range(depth) for array in arrays]

    return Recipe(f"gradients of {depth} layers", run, width * depth)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """What a layer may write to: a tensor of its own."""
    return tensor if tensor.requires_grad else tensor.clone()


def _memory(tensor: Any) -> Any:
    """What is written to a tensor's memory so far."""
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
                    f"layers and their inputs with {naming.moving()}, and pass other things as "
                    "arguments"
                )


def _check_result(result: Any, carry: Any) -> None:
    leaves, found = pytree.tree_flatten(result)
    expected, structure = pytree.tree_flatten(carry)
    if found != structure or not all(isinstance(leaf, lazy_tensor.LazyTensor) for leaf in leaves):
        texts = _brief(structure), _brief(found)
    elif [(leaf.shape, leaf.dtype) for leaf in leaves] != [
        (leaf.shape, leaf.dtype) for leaf in expected
    ]:
        texts = _text(expected), _text(leaves)
    else:
        return
    raise TypeError(
        "a scanned layer must return what it takes, for the next layer to take it; this one takes "
        f"{texts[0]} and returns {texts[1]}. Choose what is handed on with "
        "scan_layers(layers, call=lambda layer, x, *args: layer(x, *args)[0])."
    )


def _brief(structure: Any) -> str:
    return "a tensor" if structure.is_leaf() else " ".join(str(structure).split())


def _text(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
