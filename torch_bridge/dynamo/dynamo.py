"""`torch.compile(model, backend="isoshard")`: what dynamo traces becomes one entry of the tape.

Dynamo turns the model's Python into a graph, AOTAutograd splits it into a forward and a backward
graph of aten operations, and each of them is recorded as a single operation: a model of a thousand
operations costs two entries a step instead of a thousand. The optimizer's operations follow on the
same tape, so a training step is still one XLA program.

```
model = torch.compile(model.to("jax"), backend="isoshard")
loss = model(x).square().mean()         # one entry
loss.backward()                         # one more
```

A graph break runs the code in between as ever, operation by operation. Sizes that dynamo leaves
open (`dynamic=True`, or the second shape it meets) are filled in at each call: XLA programs have
static shapes, so each combination is a program of its own. Random operations draw from the `jax`
device's stream, but one key a graph: the numbers differ from those of the uncompiled model. What
the graph computes of Python's floats alone is computed on the CPU, in 64 bits (`prelude`).

torch finds the backend by an entry point, so `isoshard.torch_bridge` need not be imported first.
What dynamo has to learn of tensors on the device is in `dynamo_tensors`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from isoshard.core.runtime.caches import PROGRAMS, Bounded
from isoshard.torch_bridge._torch_internals import dynamo_hooks
from isoshard.torch_bridge._torch_internals.traced import BOXED
from isoshard.torch_bridge.engine.operators.call_template import brought, import_tensor
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.memory_log import noted_in
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.engine.values.metas import Meta
from isoshard.torch_bridge.engine.values.value import Aval, Value
from isoshard.torch_bridge.handlers.handler_registry import any_handled

from ..common import naming
from . import dynamo_tensors
from .prelude import Prelude, is_number


def backend(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
    """Compile what dynamo traced; torch calls this.

    Args:
        graph: torch operations.
        example_inputs: fake tensors on the `jax` device, and open sizes.
        **options: none are known.

    Returns:
        A function with the same inputs and results.

    Raises:
        RuntimeError: an input is on another device, and the graph does not move it to this one.
        TypeError: there are options.
    """
    if options:
        raise TypeError(f"the isoshard backend has no options, but was given {sorted(options)}")
    compiled = _aot()(graph, example_inputs)
    functions = {function for node in graph.graph.nodes if (function := _called(node)) is not None}

    def run(*args: Any) -> Any:
        # What a handler does is not in the compiled graph: then each function is called as ever.
        return graph(*args) if any_handled(functions) else compiled(*args)

    return run


def _called(node: torch.fx.Node) -> Any:
    """The torch function that a node calls, or None."""
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None)
    return node.target if node.op == "call_function" else None


class Graph:
    """A graph of aten operations that is recorded as one operation.

    Attributes:
        module: the operations; it takes and returns a flat list.
        random: whether any of them draws random numbers.
    """

    def __init__(self, module: torch.fx.GraphModule, example_inputs: Sequence[Any]):
        """Called by AOTAutograd as a compiler."""
        self.module = module
        _check_devices(module, example_inputs)
        self._prelude = Prelude(module, list(map(is_number, example_inputs)))
        targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
        self.random = any(
            torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) for target in targets
        )
        self.name = f"torch.compile graph of {len(targets)} operations"
        BOXED.put(self, True)  # AOTAutograd: give a list of arguments, which may be emptied
        self._signatures: Bounded[Any, _Signature] = Bounded(PROGRAMS, "torch.compile: signatures")

    @torch.compiler.disable
    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Record the graph."""
        with torch.no_grad():
            raw = self._prelude(arguments)
        given = [self._import(argument) for argument in raw]
        arguments.clear()
        key = tuple(
            [leaf._aval if isinstance(leaf, lazy_tensor.LazyTensor) else leaf for leaf in given]
        )
        signature = self._signatures.get(key)
        if signature is None:
            signature = self._signatures[key] = self._prepare(key)
        values = [
            lazy_tensor.read(leaf) for leaf in given if isinstance(leaf, lazy_tensor.LazyTensor)
        ]
        results = iter(tapes.recorder().record(signature.recipe, values))
        found = [_filled(mark, raw, results) for mark in signature.outputs]
        for place, mark in enumerate(signature.outputs):
            if isinstance(mark, _View):
                found[place] = mark.of(raw if mark.is_input else found)
        return found

    def _import(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, lazy_tensor.LazyTensor):
            return brought(leaf)
        return leaf

    def _prepare(self, key: tuple[Any, ...]) -> _Signature:
        """Find out what the graph returns for arguments like these."""
        inputs = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        results: Any = self.module.graph.output_node().args[0]
        outputs: list[Any] = [None] * len(results)

        def compute(arrays: Sequence[Any], _scalars: Any, draw: Any) -> list[Any]:
            given = iter(arrays)
            leaves = [
                lazy_tensor.fresh(leaf, Value.handed(next(given)))
                if isinstance(leaf, Aval)
                else leaf
                for leaf in key
            ]
            with tapes.immediately(_keys(draw)), torch.no_grad():
                got = self.module(*leaves)
                computed = []
                views = _views(leaves, got) if any(type(leaf) is int for leaf in key) else {}
                for place, (node, leaf) in enumerate(zip(results, got, strict=True)):
                    if node in inputs:
                        outputs[place] = _Same(inputs.index(node))
                    elif place in views:
                        outputs[place] = views[place]
                    elif isinstance(leaf, torch.Tensor):
                        tensor = import_tensor(torch.ops.aten.copy.default, leaf)
                        outputs[place] = _dense(tensor)
                        with jax.enable_x64(True):
                            computed.append(jnp.asarray(lazy_tensor.read(tensor).array))
                    else:
                        outputs[place] = leaf
            return computed

        run: Any = torch.compiler.disable(compute)
        shapes = [jax.ShapeDtypeStruct(*leaf.token) for leaf in key if isinstance(leaf, Aval)]
        draw = jax.eval_shape(lambda: jax.random.key(0)) if self.random else None
        # A step that is being captured touches none of these tensors.
        with noted_in(None), jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            found = jax.eval_shape(lambda arrays, draw: run(arrays, (), draw), shapes, draw)
        recipe = Recipe(self.name, run, len(found), random=self.random, detail=self)
        return _Signature(recipe, tuple(outputs))


def _check_devices(module: torch.fx.GraphModule, examples: Sequence[Any]) -> None:
    """Refuse inputs on other devices that the graph does more with than move them to this one.

    Raises:
        RuntimeError: there is one.
    """
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for place, (node, example) in enumerate(zip(inputs, examples, strict=True)):
        if not isinstance(example, torch.Tensor) or not example.dim():
            continue
        if example.device.type not in naming.OURS and not all(map(_moves_here, node.users)):
            raise RuntimeError(
                f'torch.compile(backend="isoshard") got input {place} of the traced graph (shape '
                f"{tuple(example.shape)}, {example.dtype}) on {example.device}; move the model and "
                f"its inputs with {naming.moving()}, or isoshard.shard(.., mesh, spec)"
            )


def _moves_here(node: torch.fx.Node) -> bool:
    """Whether a node of the graph moves a tensor to this device."""
    device = node.kwargs.get("device")
    moves = node.target is torch.ops.aten._to_copy.default
    return moves and isinstance(device, torch.device) and device.type in naming.OURS


@dataclasses.dataclass(frozen=True)
class _Same:
    """A result that is one of the arguments."""

    number: int


@dataclasses.dataclass(frozen=True)
class _View:
    """A result that is a view of an argument or of another result.

    Where sizes or indices are open, AOTAutograd takes nothing of such a result but size, stride and
    offset, and makes it of its base.
    """

    number: int
    is_input: bool
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensors: Sequence[Any]) -> torch.Tensor:
        """The view."""
        base: torch.Tensor = tensors[self.number]
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


def _views(leaves: Sequence[Any], results: Sequence[Any]) -> dict[int, _View]:
    """The results that are views, by position.

    Args:
        leaves: the arguments.
        results: of the graph.
    """
    bases: dict[int, tuple[int, bool, torch.dtype]] = {}
    for group, is_input in ((results, False), (leaves, True)):
        for number, one in enumerate(group):
            if isinstance(one, lazy_tensor.LazyTensor) and not one._chain.ops:
                bases[id(one._storage)] = number, is_input, one.dtype
    views = {}
    for place, one in enumerate(results):
        if isinstance(one, lazy_tensor.LazyTensor) and one._chain.ops:
            number, is_input, dtype = bases.get(id(one._storage), (0, False, None))
            if dtype == one.dtype:
                where = tuple(one.shape), tuple(one.stride()), int(one.storage_offset())
                views[place] = _View(number, is_input, *where)
    return views


@dataclasses.dataclass(frozen=True)
class _Signature:
    recipe: Recipe
    outputs: tuple[Any, ...]


def _filled(mark: Any, given: Sequence[Any], results: Iterator[Value]) -> Any:
    if isinstance(mark, _Same):
        return given[mark.number]
    return lazy_tensor.fresh(mark, next(results)) if isinstance(mark, Aval) else mark


def _dense(tensor: lazy_tensor.LazyTensor) -> Aval:
    """The aval of a tensor with memory of its own: strides that leave no gaps and no overlap."""
    meta = tensor._aval.meta
    return Aval.of(Meta.of(torch.empty_like(meta.tensor())))


def _keys(draw: Any) -> Any:
    """Random keys for the operations of one graph."""
    if draw is None:
        return None
    return (jax.random.fold_in(draw, number) for number in itertools.count())


@functools.cache
def _aot() -> Any:
    """AOTAutograd with our compilers; torch imports much for it."""
    make = dynamo_hooks.AOT_AUTOGRAD.found()
    return make(fw_compiler=Graph, bw_compiler=Graph, inference_compiler=Graph)


dynamo_tensors.teach()
