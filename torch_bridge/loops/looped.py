"""A module that runs identical layers as one loop of the compiled program.

What both forms of scanned layers share: `ScanLayers`, which keeps the layers, and `StackedLayers`,
which keeps one parameter for all of them. The loop itself is `engine.loop`; here it is traced when
its inputs are new, and put into torch's autograd graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.engine import aside, base
from isoshard.torch_bridge.engine import tape as tapes
from isoshard.torch_bridge.engine.capture.executed import Executed, current
from isoshard.torch_bridge.engine.capture.guards import Guard
from isoshard.torch_bridge.engine.capture.reachable import Reachable
from isoshard.torch_bridge.engine.loop import Input, Loop
from isoshard.torch_bridge.engine.value import Aval

from .alike import Stack


class Looped(torch.nn.Module):
    """Layers that run as one loop where their input is on `jax`, and in turn elsewhere."""

    _depth: int
    _holds_stacks: bool
    _checkpoint: bool
    _call: Callable[..., Any] | None
    _ignore: tuple[str, ...]
    _stack: Stack
    _loops: dict[Any, _Traced]
    _in_turn: Callable[..., Any]

    def _prepare(self, checkpoint: bool, call: Any, ignore: Collection[str]) -> None:
        self._checkpoint = checkpoint
        self._call = call
        self._ignore = tuple(ignore)
        self._stack = Stack(self._held(), self._ignore)
        self._loops = {}

    def _held(self) -> list[torch.nn.Module]:
        """The modules that hold the parameters."""
        raise NotImplementedError

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `x` through all layers.

        Raises:
            TypeError: an argument is neither a tensor nor hashable, or a layer does not return what
                it takes.
            ValueError: the layers are not alike any more, or use a tensor from elsewhere.
        """
        carried, structure = pytree.tree_flatten(x)
        if not any(isinstance(leaf, base.LazyTensor) for leaf in carried):
            return self._in_turn(x, *args, **kwargs)
        rest, arguments = pytree.tree_flatten((args, kwargs))
        places = [n for n, leaf in enumerate(rest) if isinstance(leaf, torch.Tensor)]
        shared = [rest[n] for n in places]
        fixed = tuple([None if isinstance(leaf, torch.Tensor) else leaf for leaf in rest])
        held = self._held()
        if not self._stack.is_current(held):
            self._stack = Stack(held, self._ignore)
            self._loops.clear()
        own = self._stack.tensors()
        _check_tensors(carried, shared, own)
        carried, shared, own = (aside.inside(group) for group in (carried, shared, own))
        wants = torch.is_grad_enabled()
        inputs = tuple(
            tuple([Input(aval(t), wants and t.requires_grad) for t in group])
            for group, aval in (
                (carried, _aval),
                (shared, _aval),
                (self._stack.merged(own), _part_aval if self._holds_stacks else _aval),
            )
        )
        key = (structure, arguments, fixed, inputs, self._stack.modes(), _autocast())
        key = (*key, tapes.takes_constants())
        found = self._loops.get(_hashable(key))
        if found is not None and not found.guard.holds():
            self._stack = Stack(held, self._ignore)
            self._loops.clear()
            found = None
        if found is None:

            def layer(carried: Any, shared: Any, own: Any) -> Any:
                given = list(fixed)
                for place, tensor in zip(places, shared, strict=True):
                    given[place] = tensor
                args, kwargs = pytree.tree_unflatten(given, arguments)
                one = OneLayer(self._one, self._stack.first)
                names = [f"layer.{name}" for name in self._stack.names]
                inside = dict(zip(names, own, strict=True))
                carried = pytree.tree_unflatten(carried, structure)
                result = torch.func.functional_call(one, inside, (carried, *args), kwargs)
                return _flat_like(result, structure)

            found = self._loops[key] = _Traced(
                lambda: Loop(
                    layer,
                    self._depth,
                    *inputs,
                    again=self._checkpoint,
                    stacked=self._holds_stacks,
                ),
                [*held, self._call],
            )
        else:
            found.join()
        loop = found.loop
        results = _Scan.apply(loop, *carried, *shared, *own)
        return pytree.tree_unflatten(list(results), structure)

    def _one(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return layer(*args, **kwargs) if self._call is None else self._call(layer, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Copies trace their own loops."""
        return {**self.__dict__, "_loops": {}, "_stack": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`."""
        super().__setstate__(state)
        self._stack = Stack(self._held(), self._ignore)


class _Traced:
    """A loop, and what the code of its layers read when it was traced.

    Args:
        trace: gives the loop.
        behind: the layers, and what calls them.
    """

    def __init__(self, trace: Callable[[], Loop], behind: Sequence[Any]):
        """Trace."""
        with Executed() as self._executed:
            self.loop = trace()
        reachable = Reachable(self._executed)
        for number, one in enumerate(behind):
            reachable.follow(one, f"layer {number}")
        reachable.follow_code(self._executed.codes)
        self.guard = Guard(reachable.holders)

    def join(self) -> None:
        """Let a step that is being captured know what code its layers would have run."""
        around = current()
        if around is not None:
            around.include(self._executed)


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


class _Scan(torch.autograd.Function):
    """The loops in torch's autograd graph."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, *tensors: Any) -> tuple[Any, ...]:
        values = [base.read(tensor) for tensor in tensors]
        results = iter(tapes.recorder().record(loop.forward, values))
        outputs = tuple([base.fresh(one.aval, next(results)) for one in loop.carried])
        residuals = [base.fresh(aval, next(results)) for aval in loop.residuals]
        width, skipped = len(loop.own), len(loop.carried) + len(loop.shared)
        ctx.loop = loop
        # A buffer may be written to before backward, which needs the value it had.
        kept = [
            tensor if tensor.requires_grad else base.fresh(tensor._aval, value)
            for tensor, value in zip(tensors, values, strict=True)
        ]
        ctx.save_for_backward(*kept[len(loop.carried) :], *residuals)
        floating = set(loop.floating)
        ctx.mark_non_differentiable(*[o for n, o in enumerate(outputs) if n not in floating])
        for number in loop.written:
            for start in range(skipped, len(tensors), width):
                tensor = tensors[start + number]
                tensor.copy_(base.fresh(tensor._aval, next(results)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "scan_layers has no gradients of gradients (create_graph=True); run the layers one "
                "after the other for those: for layer in layers: x = layer(x)"
            )
        loop: Loop = ctx.loop
        given = [*(grads[number] for number in loop.floating), *ctx.saved_tensors]
        backward: Any = loop.backward
        results = tapes.recorder().record(backward, [base.read(tensor) for tensor in given])
        found = iter(results)
        carried: list[Any] = [None] * len(loop.carried)
        for number in loop.floating:
            carried[number] = base.fresh(loop.carried[number].aval, next(found))
        shared = [base.fresh(o.aval, next(found)) if o.wanted else None for o in loop.shared]
        width = len(loop.own)
        own: list[Any] = [None] * (loop.copies * width)
        inputs = ctx.saved_tensors[len(loop.shared) :]
        for number, one in enumerate(loop.own):
            for place in range(number, len(own), width) if one.wanted else ():
                own[place] = base.fresh(inputs[place]._aval, next(found))
        return (None, *carried, *shared, *own)


def _aval(tensor: base.LazyTensor) -> Aval:
    return tensor._aval


def _part_aval(tensor: base.LazyTensor) -> Aval:
    """Of one layer's part of a stacked tensor."""
    return Aval.contiguous(tuple(tensor.shape[1:]), tensor.dtype)


def _check_tensors(carried: list[Any], shared: list[Any], own: list[Any]) -> None:
    for what, group in (("x", carried), ("an argument", shared), ("a parameter or buffer", own)):
        for tensor in group:
            if not isinstance(tensor, base.LazyTensor):
                kind = f"on {tensor.device}" if isinstance(tensor, torch.Tensor) else repr(tensor)
                raise TypeError(
                    f"scan_layers takes tensors on the jax device, but {what} is {kind}; move the "
                    "layers and their inputs with .to('jax'), and pass other things as arguments"
                )


def _hashable(key: Any) -> Any:
    try:
        hash(key)
    except TypeError as error:
        raise TypeError(
            f"scan_layers takes tensors and hashable arguments, or nestings of them: {error}"
        ) from None
    return key


def _flat_like(result: Any, structure: Any) -> list[Any]:
    leaves, found = pytree.tree_flatten(result)
    if found != structure or not all(isinstance(leaf, base.LazyTensor) for leaf in leaves):
        raise TypeError(
            "a scanned layer must return what it takes, for the next layer to take it; this one "
            f"takes {_brief(structure)} and returns {_brief(found)}. Choose what is handed on with "
            "scan_layers(layers, call=lambda layer, x, *args: layer(x, *args)[0])."
        )
    return leaves


def _brief(structure: Any) -> str:
    return "a tensor" if structure.is_leaf() else " ".join(str(structure).split())


def _autocast() -> Any:
    return torch.is_autocast_enabled("jax") and torch.get_autocast_dtype("jax")
