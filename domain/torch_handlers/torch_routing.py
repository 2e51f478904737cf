"""A call of a torch function that has a handler, on tensors of the `jax` device.

The handler's work is one JAX function (`core.domain.handlers`), recorded on the tape as any other
that is called from torch. Where an argument has a `BlockLayout` the program is interpreted on
blocks; there the call is its handler, and the function itself only says the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding

from isoshard.core.blocks.array_layout import ArrayLayout
from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.blocks.interpreting import trace
from isoshard.core.blocks.known_shardings import said
from isoshard.core.errors import ShardingError
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.lifting.in_blocks import in_blocks
from isoshard.core.runtime._jax_internals.jaxpr_classes import jaxpr_as_fun
from isoshard.core.runtime.exact_keys import exact
from isoshard.domain.handlers.calling import Handled, HandlerCall, call, plan
from isoshard.domain.handlers.handler_arguments import Arguments, Static, paths_of
from isoshard.domain.handlers.results import Result
from isoshard.torch_bridge._torch_internals.undocumented import DisableTorchFunctionSubclass
from isoshard.torch_bridge.common.dtypes import physical_dtype
from isoshard.torch_bridge.handlers.handler_registry import Entry
from isoshard.torch_bridge.interop.calling_jax import TorchFunction
from isoshard.torch_bridge.interop.torch_to_jax import JaxFunction
from isoshard.torch_bridge.layout import marks

from .expecting import Expected
from .operand_layouts import read_layouts, said_on, typed_mesh
from .torch_handler import in_jax


def routed(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a handler if a tensor is split, else nothing.

    Raises:
        ShardingError: a layout is not known, meshes differ, or the results do not fit.
        TypeError: an argument is neither a tensor nor hashable.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    paths = paths_of(structure)
    at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[n] for n in at]
    laid, mesh = read_layouts([paths[n] for n in at], tensors, entry.name)
    lies = dict(zip(at, laid, strict=True))
    frames = tuple(
        lies[n] if n in lies else _static(leaf, entry.name) for n, leaf in enumerate(leaves)
    )
    arguments = Arguments(structure, paths, frames, mesh)
    if not arguments.split:
        return NotImplemented
    if isinstance(kwargs.get("out"), torch.Tensor):
        raise ShardingError(f"{entry.name} has a handler, which cannot write to out=; leave it out")
    dtypes = tuple(tensor.dtype for tensor in tensors)
    key = arguments, dtypes
    known = entry.known.get(key)
    if known is None:
        known = entry.known[key] = _HandlerCall(entry, arguments, dtypes)
    return known(tensors)


class _HandlerCall:
    """A handler for arguments of these layouts."""

    def __init__(self, entry: Entry, arguments: Arguments, dtypes: Sequence[torch.dtype]) -> None:
        self._expected = Expected(entry.function, entry.name, dtypes) if entry.check else None
        handler = entry.handler
        handler = handler if entry.framework == "jax" else in_jax(handler, dtypes)
        self._handled = Handled(entry.name, handler, self._expected, entry.prove)
        self._arguments = arguments
        laid = [layout for _, layout in arguments.arrays()]
        uneven = any(layout.uneven for layout in laid)
        physical = [physical_dtype(dtype) for dtype in dtypes]
        with jax.enable_x64(True):
            self._plan = _planned(self._handled, arguments, laid, physical)
        if not uneven and any(any(result.sizes) for result in self._plan.results):
            raise ShardingError(
                f"the handler of {entry.name} gives blocks of unequal sizes, and all its arguments "
                'are in equal ones; lay one of them out with iso.shard(.., uneven="pad")'
            )
        run = self._on_blocks(entry, laid, physical) if uneven else self._on_arrays
        self._function = TorchFunction(run, entry.name, wide=True)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Record the call; the results have their layouts."""
        found = self._function(*tensors)
        dtypes = (self._expected and self._expected.dtypes) or [one.dtype for one in found]
        mesh = self._arguments.mesh
        assert mesh is not None
        typed = typed_mesh(tensors)
        results = [
            _marked(one if one.dtype == dtype else one.to(dtype), result, mesh, typed)
            for one, dtype, result in zip(found, dtypes, self._plan.results, strict=True)
        ]
        made = jax.tree.unflatten(self._plan.structure, results)
        return self._expected.rebuilt(made) if self._expected else made

    def _on_arrays(self, *arrays: jax.Array) -> list[Any]:
        return jax.tree.leaves(said(call(self._handled, self._arguments, arrays)))

    def _on_blocks(self, entry: Entry, laid: Sequence[ArrayLayout], physical: Any) -> Any:
        """The call as one primitive, which a program on blocks answers with the handler."""
        plain = JaxFunction(entry.function)

        def whole(*arrays: jax.Array) -> list[Any]:
            args, kwargs = self._arguments.filled(arrays)
            with DisableTorchFunctionSubclass():
                return jax.tree.leaves(plain(*args, **kwargs))

        def rule(*operands: Any) -> list[Any]:
            arrays = []
            for number, (operand, layout) in enumerate(zip(operands, laid, strict=True)):
                uneven = isinstance(operand, UnevenArray)
                sizes = operand.sizes if uneven else (None,) * len(layout.sizes)
                own = tuple(
                    size if layout.padded(axis) or sizes[axis] is not None else None
                    for axis, size in enumerate(layout.sizes)
                )
                if uneven != layout.uneven or (uneven and sizes != own):
                    raise ShardingError(
                        f"tensor {number} given to {entry.name} lies in blocks {sizes}, and was "
                        f"said to lie in {layout.sizes}"
                    )
                arrays.append(operand.array if uneven else operand)
            found = said(call(self._handled, self._arguments, arrays))
            return jax.tree.leaves(found, is_leaf=lambda one: isinstance(one, UnevenArray))

        shapes = [
            jax.ShapeDtypeStruct(layout.shape, dtype)
            for layout, dtype in zip(laid, physical, strict=True)
        ]

        def run(*arrays: jax.Array) -> list[Any]:
            closed, _ = trace(in_blocks(whole, rule), shapes)
            return jaxpr_as_fun(closed)(*arrays)

        return run


def _planned(
    handled: Handled, arguments: Arguments, laid: Sequence[ArrayLayout], physical: Sequence[Any]
) -> HandlerCall:
    shapes = [
        jax.ShapeDtypeStruct(layout.buffer, dtype)
        for layout, dtype in zip(laid, physical, strict=True)
    ]
    return plan(handled, arguments, shapes)


def _marked(tensor: Any, result: Result, mesh: Mesh, typed: Mesh | None) -> Any:
    """A result with its layout, on the mesh with Explicit axes if arguments are."""
    sharding = NamedSharding(mesh, result.spec)
    layout: Any = sharding
    if any(size is not None for size in result.sizes):
        layout = BlockLayout.plan(result.shape, mesh, sharding, result.sizes)
    marks.lies(tensor, said_on(layout, typed))
    return tensor


def _static(leaf: Any, name: str) -> Static:
    try:
        hash(leaf)
    except TypeError:
        raise TypeError(
            f"{name} has a handler, which takes tensors and hashable arguments, and was given a "
            f"{type(leaf).__name__}"
        ) from None
    return Static(leaf, exact(leaf))
