"""A call of a torch function that has a handler, on tensors of the `jax` device.

The handler's work is one JAX function (`domain.handlers`), recorded on the tape as any other
that is called from torch. Where an argument has a `BlockLayout` the program is interpreted on
blocks; there the call is its handler, and the function itself only gives the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding

from isoshard.core.kit import (
    ArrayLayout,
    BlockLayout,
    ShardingError,
    UnevenArray,
    exact,
    in_blocks,
    jaxpr_as_fun,
    record_shardings,
    trace,
)
from isoshard.domain.handlers.calling import Handled, HandlerCall, call, plan
from isoshard.domain.handlers.handler_arguments import Arguments, Static, paths_of
from isoshard.domain.handlers.results import Result
from isoshard.torch_bridge.kit import (
    DisableTorchFunctionSubclass,
    Entry,
    JaxFunction,
    TorchFunction,
    marks,
    physical_dtype,
)

from .expecting import Expected
from .operand_layouts import layout_on, read_layouts, typed_mesh
from .torch_handler import in_jax


def routed(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a handler if a tensor is split, else nothing.

    Raises:
        ShardingError: a sharding is unknown, meshes differ, or the results do not fit.
        TypeError: an argument is neither a tensor nor hashable.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    paths = paths_of(structure)
    at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[n] for n in at]
    layouts, mesh = read_layouts([paths[n] for n in at], tensors, entry.name)
    layout_at = dict(zip(at, layouts, strict=True))
    frames = tuple(
        layout_at[n] if n in layout_at else _static(leaf, entry.name)
        for n, leaf in enumerate(leaves)
    )
    arguments = Arguments(structure, paths, frames, mesh)
    if not arguments.split:
        return NotImplemented
    if isinstance(kwargs.get("out"), torch.Tensor):
        raise ShardingError(f"{entry.name} has a handler, which cannot write to out=; leave it out")
    dtypes = tuple(tensor.dtype for tensor in tensors)
    key = arguments, dtypes
    cached = entry.calls.get(key)
    if cached is None:
        cached = entry.calls[key] = _HandlerCall(entry, arguments, dtypes)
    return cached(tensors)


class _HandlerCall:
    """A handler for arguments of given layouts."""

    def __init__(self, entry: Entry, arguments: Arguments, dtypes: Sequence[torch.dtype]) -> None:
        self._expected = Expected(entry.function, entry.name, dtypes) if entry.check else None
        handler = entry.handler
        handler = handler if entry.framework == "jax" else in_jax(handler, dtypes)
        self._handled = Handled(entry.name, handler, self._expected, entry.prove)
        self._arguments = arguments
        layouts = [layout for _, layout in arguments.arrays()]
        uneven = any(layout.uneven for layout in layouts)
        physical = [physical_dtype(dtype) for dtype in dtypes]
        with jax.enable_x64(True):
            self._plan = _planned(self._handled, arguments, layouts, physical)
        if not uneven and any(any(result.sizes) for result in self._plan.results):
            raise ShardingError(
                f"the handler of {entry.name} gives blocks of unequal sizes, and all its arguments "
                'are in equal ones; lay one of them out with iso.shard(.., uneven="pad")'
            )
        run = self._on_blocks(entry, layouts, physical) if uneven else self._on_arrays
        self._function = TorchFunction(run, entry.name, wide=True)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Record the call; the results have their shardings."""
        outputs = self._function(*tensors)
        dtypes = (self._expected and self._expected.dtypes) or [output.dtype for output in outputs]
        mesh = self._arguments.mesh
        assert mesh is not None
        typed = typed_mesh(tensors)
        results = [
            _marked(output if output.dtype == dtype else output.to(dtype), result, mesh, typed)
            for output, dtype, result in zip(outputs, dtypes, self._plan.results, strict=True)
        ]
        tree = jax.tree.unflatten(self._plan.structure, results)
        return self._expected.rebuilt(tree) if self._expected else tree

    def _on_arrays(self, *arrays: jax.Array) -> list[Any]:
        return jax.tree.leaves(record_shardings(call(self._handled, self._arguments, arrays)))

    def _on_blocks(self, entry: Entry, layouts: Sequence[ArrayLayout], physical: Any) -> Any:
        """The call as one primitive, which a program on blocks answers with the handler."""
        plain = JaxFunction(entry.function)

        def unsharded(*arrays: jax.Array) -> list[Any]:
            args, kwargs = self._arguments.filled(arrays)
            with DisableTorchFunctionSubclass():
                return jax.tree.leaves(plain(*args, **kwargs))

        def rule(*operands: Any) -> list[Any]:
            arrays = []
            for index, (operand, layout) in enumerate(zip(operands, layouts, strict=True)):
                uneven = isinstance(operand, UnevenArray)
                sizes = operand.sizes if uneven else (None,) * len(layout.sizes)
                expected = tuple(
                    size if layout.padded(axis) or sizes[axis] is not None else None
                    for axis, size in enumerate(layout.sizes)
                )
                if uneven != layout.uneven or (uneven and sizes != expected):
                    raise ShardingError(
                        f"tensor {index} of {entry.name} is in blocks {sizes}, and was "
                        f"declared to be in {layout.sizes}"
                    )
                arrays.append(operand.array if uneven else operand)
            outputs = record_shardings(call(self._handled, self._arguments, arrays))
            return jax.tree.leaves(outputs, is_leaf=lambda leaf: isinstance(leaf, UnevenArray))

        shapes = [
            jax.ShapeDtypeStruct(layout.shape, dtype)
            for layout, dtype in zip(layouts, physical, strict=True)
        ]

        def run(*arrays: jax.Array) -> list[Any]:
            closed, _ = trace(in_blocks(unsharded, rule), shapes)
            return jaxpr_as_fun(closed)(*arrays)

        return run


def _planned(
    handled: Handled, arguments: Arguments, layouts: Sequence[ArrayLayout], physical: Sequence[Any]
) -> HandlerCall:
    shapes = [
        jax.ShapeDtypeStruct(layout.buffer, dtype)
        for layout, dtype in zip(layouts, physical, strict=True)
    ]
    return plan(handled, arguments, shapes)


def _marked(tensor: Any, result: Result, mesh: Mesh, typed: Mesh | None) -> Any:
    """A result with its sharding, on the mesh with Explicit axes if arguments are."""
    sharding = NamedSharding(mesh, result.spec)
    layout: Any = sharding
    if any(size is not None for size in result.sizes):
        layout = BlockLayout.plan(result.shape, mesh, sharding, result.sizes)
    marks.mark_result(tensor, layout_on(layout, typed))
    return tensor


def _static(leaf: Any, name: str) -> Static:
    try:
        hash(leaf)
    except TypeError:
        raise TypeError(
            f"{name} has a handler, which takes tensors and hashable arguments, and got a "
            f"{type(leaf).__name__}"
        ) from None
    return Static(leaf, exact(leaf))
