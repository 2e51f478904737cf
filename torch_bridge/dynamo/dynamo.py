"""`torch.compile(model, backend="isoshard")`: a graph that dynamo traces is one entry of the tape.

Dynamo turns the model's Python into a graph, AOTAutograd splits it into a forward and a backward
graph of aten operations, and each of them is recorded as a single operation: a model of a thousand
operations costs two entries a step instead of a thousand. The optimizer's operations follow on the
same tape, so a training step is still one XLA program.

```
model = torch.compile(model.to("jax"), backend="isoshard")
loss = model(x).square().mean()         # one entry
loss.backward()                         # one more
```

At a graph break the code in between runs without compilation, operation by operation. Symbolic
sizes of dynamo (`dynamic=True`, or a second shape) get their values at each call: XLA programs have
static shapes, so each combination is a program of its own. Random operations draw from the `jax`
device's stream, but one key a graph: the numbers differ from those of the uncompiled model.
Arithmetic of Python's floats runs on the CPU, in 64 bits (`prelude`).

torch loads the backend by an entry point, so `isoshard.torch_bridge` need not be imported first.
`dynamo_tensors` teaches dynamo to trace tensors on the device.
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
from isoshard.torch_bridge.engine.recording.memory_log import logged_to
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.engine.values.metas import Meta
from isoshard.torch_bridge.engine.values.value import Aval, Value
from isoshard.torch_bridge.handlers.handler_registry import any_handled

from ..common import naming
from . import dynamo_tensors
from .prelude import Prelude, is_cpu_scalar


def backend(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
    """Compile a graph that dynamo traced; torch calls this.

    Args:
        graph: torch operations.
        example_inputs: fake tensors on the `jax` device, and symbolic sizes.
        **options: there are none.

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
        # Function handlers are not in the compiled graph: with one, call each function uncompiled.
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
        self._prelude = Prelude(module, list(map(is_cpu_scalar, example_inputs)))
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
        inputs = [self._import(argument) for argument in raw]
        arguments.clear()
        key = tuple(
            [leaf._aval if isinstance(leaf, lazy_tensor.LazyTensor) else leaf for leaf in inputs]
        )
        signature = self._signatures.get(key)
        if signature is None:
            signature = self._signatures[key] = self._prepare(key)
        values = [
            lazy_tensor.read(leaf) for leaf in inputs if isinstance(leaf, lazy_tensor.LazyTensor)
        ]
        results = iter(tapes.recorder().record(signature.recipe, values))
        outputs = [_filled(mark, raw, results) for mark in signature.outputs]
        for index, mark in enumerate(signature.outputs):
            if isinstance(mark, _View):
                outputs[index] = mark.of(raw if mark.is_input else outputs)
        return outputs

    def _import(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, lazy_tensor.LazyTensor):
            return brought(leaf)
        return leaf

    def _prepare(self, key: tuple[Any, ...]) -> _Signature:
        """Trace the graph for these shapes: returns its program, and how to build its results."""
        inputs = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        results: Any = self.module.graph.output_node().args[0]
        outputs: list[Any] = [None] * len(results)

        def compute(arrays: Sequence[Any], _scalars: Any, draw: Any) -> list[Any]:
            arrays_left = iter(arrays)
            leaves = [
                lazy_tensor.fresh(leaf, Value.handed(next(arrays_left)))
                if isinstance(leaf, Aval)
                else leaf
                for leaf in key
            ]
            with tapes.immediately(_keys(draw)), torch.no_grad():
                returned = self.module(*leaves)
                computed = []
                views = _views(leaves, returned) if any(type(leaf) is int for leaf in key) else {}
                for index, (node, leaf) in enumerate(zip(results, returned, strict=True)):
                    if node in inputs:
                        outputs[index] = _Same(inputs.index(node))
                    elif index in views:
                        outputs[index] = views[index]
                    elif isinstance(leaf, torch.Tensor):
                        tensor = import_tensor(torch.ops.aten.copy.default, leaf)
                        outputs[index] = _dense(tensor)
                        with jax.enable_x64(True):
                            computed.append(jnp.asarray(lazy_tensor.read(tensor).array))
                    else:
                        outputs[index] = leaf
            return computed

        run: Any = torch.compiler.disable(compute)
        shapes = [jax.ShapeDtypeStruct(*leaf.token) for leaf in key if isinstance(leaf, Aval)]
        draw = jax.eval_shape(lambda: jax.random.key(0)) if self.random else None
        # A step that is being captured touches none of these tensors.
        with logged_to(None), jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            out_shapes = jax.eval_shape(lambda arrays, draw: run(arrays, (), draw), shapes, draw)
        recipe = Recipe(self.name, run, len(out_shapes), random=self.random, detail=self)
        return _Signature(recipe, tuple(outputs))


def _check_devices(module: torch.fx.GraphModule, examples: Sequence[Any]) -> None:
    """Check that the graph moves all inputs on other devices to this one.

    Raises:
        RuntimeError: it computes with one elsewhere.
    """
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for index, (node, example) in enumerate(zip(inputs, examples, strict=True)):
        if not isinstance(example, torch.Tensor) or not example.dim():
            continue
        if example.device.type not in naming.OURS and not all(map(_moves_to_jax, node.users)):
            raise RuntimeError(
                f'torch.compile(backend="isoshard") got input {index} of the traced graph (shape '
                f"{tuple(example.shape)}, {example.dtype}) on {example.device}; move the model and "
                f"its inputs with {naming.moving()}, or isoshard.shard(.., mesh, spec)"
            )


def _moves_to_jax(node: torch.fx.Node) -> bool:
    """Whether a node of the graph moves a tensor to this device."""
    device = node.kwargs.get("device")
    moves = node.target is torch.ops.aten._to_copy.default
    return moves and isinstance(device, torch.device) and device.type in naming.OURS


@dataclasses.dataclass(frozen=True)
class _Same:
    """A result that is the argument `index`."""

    index: int


@dataclasses.dataclass(frozen=True)
class _View:
    """A result that is a view of the argument or result `base`.

    With symbolic sizes or indices, AOTAutograd reads size, stride and offset of such a result, and
    builds it from its base.
    """

    base: int
    is_input: bool
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensors: Sequence[Any]) -> torch.Tensor:
        """The view."""
        base: torch.Tensor = tensors[self.base]
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


def _views(leaves: Sequence[Any], results: Sequence[Any]) -> dict[int, _View]:
    """The results that are views, by position."""
    bases: dict[int, tuple[int, bool, torch.dtype]] = {}
    for group, is_input in ((results, False), (leaves, True)):
        for base, tensor in enumerate(group):
            if isinstance(tensor, lazy_tensor.LazyTensor) and not tensor._chain.ops:
                bases[id(tensor._storage)] = base, is_input, tensor.dtype
    views = {}
    for index, tensor in enumerate(results):
        if isinstance(tensor, lazy_tensor.LazyTensor) and tensor._chain.ops:
            base, is_input, dtype = bases.get(id(tensor._storage), (0, False, None))
            if dtype == tensor.dtype:
                where = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
                views[index] = _View(base, is_input, *where)
    return views


@dataclasses.dataclass(frozen=True)
class _Signature:
    recipe: Recipe
    outputs: tuple[Any, ...]


def _filled(mark: Any, inputs: Sequence[Any], results: Iterator[Value]) -> Any:
    if isinstance(mark, _Same):
        return inputs[mark.index]
    return lazy_tensor.fresh(mark, next(results)) if isinstance(mark, Aval) else mark


def _dense(tensor: lazy_tensor.LazyTensor) -> Aval:
    """The aval of a tensor with memory of its own: strides that leave no gaps and no overlap."""
    meta = tensor._aval.meta
    return Aval.of(Meta.of(torch.empty_like(meta.tensor())))


def _keys(draw: Any) -> Any:
    """Random keys for the operations of one graph."""
    if draw is None:
        return None
    return (jax.random.fold_in(draw, index) for index in itertools.count())


@functools.cache
def _aot() -> Any:
    """AOTAutograd with our compilers; imported at the first use, as torch imports much for it."""
    make = dynamo_hooks.AOT_AUTOGRAD.resolve()
    return make(fw_compiler=Graph, bw_compiler=Graph, inference_compiler=Graph)


dynamo_tensors.teach()
