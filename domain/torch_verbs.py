"""Core's verbs over split axes, called on torch tensors: halos, rings, neighbours.

>>> import isoshard as iso
>>> mesh = iso.make_mesh((4,), ("x",))
>>> t = iso.shard(torch.arange(6.0), mesh, ("x",), uneven="pad", sizes=(1, 2, 0, 3))
>>> y = iso.domain.cumsum(t, 0)
>>> y.tolist(), y.block_sizes
([0.0, 1.0, 3.0, 6.0, 10.0, 15.0], ((1, 2, 0, 3),))

A verb needs to know how its arrays are sharded; `torch_handlers.operand_layouts` reads it.
It is then recorded as any JAX function called from torch, with a gradient. On tensors in equal
blocks it runs in the program as it is. Where blocks are padded, before or after, it is a function
with two bodies (`in_blocks`): a program on blocks takes the one that takes `UnevenArray`s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding

from isoshard.core.kit import (
    PROGRAMS,
    ArrayLayout,
    BlockLayout,
    Bounded,
    ShardingError,
    any_mesh,
    auto,
    closed_sharding_of,
    in_blocks,
    is_typed,
    is_uneven,
    jaxpr_as_fun,
    lay_in_blocks,
    on_mesh,
    pack,
    padded_of,
    recorded_shardings,
    to_torch,
    trace,
    unpack,
)
from isoshard.torch_bridge.kit import TorchFunction, marks, physical_dtype

from .torch_handlers.operand_layouts import layout_on, read_layouts, typed_mesh

_CACHE: Bounded[Any, tuple[TorchFunction, Any]] = Bounded(PROGRAMS, "domain: functions of tensors")


def call(verb: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a verb of core's on tensors.

    Raises:
        ShardingError: tensors are on several meshes; a sharding is unknown; or whatever the
            verb raises.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    explicit_mesh = next(filter(None, map(_typed_mesh, leaves)), None)
    leaves = [_under_auto(leaf) for leaf in leaves]
    at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) or _is_data(leaf)]
    tensors = [_tensor(leaves[n]) for n in at]
    layouts, _ = read_layouts([(f"tensor {n}",) for n in range(len(at))], tensors, verb.__name__)
    if not any(map(_on_mesh, layouts)) and kwargs.get("mesh") is None:
        raise ShardingError(
            f"{verb.__name__}: these tensors are on no mesh; shard them with isoshard.shard(x, "
            "mesh, spec), or pass mesh=.., spec=.."
        )
    rest = [n for n in range(len(leaves)) if n not in at]
    avals = tuple((tuple(t.shape), t.dtype) for t in tensors)
    fixed = tuple(_key(leaves[n]) for n in rest)
    key = (verb, structure, tuple(at), tuple(layouts), avals, fixed)
    cached = _CACHE.get(key)
    if cached is None:
        calling = _Calling(verb, structure, tuple(at), tuple(layouts), leaves)
        cached = _CACHE[key] = calling.function(tensors)
    function, results = cached
    outputs, tree = jax.tree.flatten(function(*tensors))
    typed = explicit_mesh or typed_mesh(tensors)
    for output, layout in zip(outputs, results, strict=True):
        if isinstance(layout, BlockLayout) or (layout is not None and explicit_mesh is not None):
            marks.mark_result(output, layout_on(layout, typed))
    return jax.tree.unflatten(tree, outputs)


@dataclasses.dataclass(frozen=True, eq=False)
class _Calling:
    """A verb, with all its arguments but tensors.

    Attributes:
        verb: see `call`.
        structure: of its arguments.
        at: which leaves are tensors.
        layouts: of those.
        leaves: all of them.
    """

    verb: Callable[..., Any]
    structure: Any
    at: tuple[int, ...]
    layouts: tuple[ArrayLayout, ...]
    leaves: Sequence[Any]

    def function(self, tensors: Sequence[torch.Tensor]) -> tuple[TorchFunction, list[Any]]:
        """The verb as a torch function, and the shardings of its results where it records them."""
        shapes = [
            jax.ShapeDtypeStruct(tuple(tensor.shape), physical_dtype(tensor.dtype))
            for tensor in tensors
        ]
        padded = [
            jax.ShapeDtypeStruct(layout.buffer if layout.uneven else shape.shape, shape.dtype)
            for layout, shape in zip(self.layouts, shapes, strict=True)
        ]
        results: list[Any] = []

        def probe(*arrays: Any) -> Any:
            return self._on_blocks(*self._entered(arrays), results=results)

        with jax.enable_x64(True):
            jax.eval_shape(probe, *padded)
        name, uneven = self.verb.__name__, any(layout.uneven for layout in self.layouts)
        if not uneven and not any(isinstance(layout, BlockLayout) for layout in results):
            return TorchFunction(self._on_blocks, name, wide=True), results
        return TorchFunction(self._with_two_bodies(shapes), name, wide=True), results

    def _on_blocks(self, *operands: Any, results: list[Any] | None = None) -> Any:
        """The verb of arrays with the declared shardings, or `UnevenArray`s; fills in `results`."""
        leaves = list(self.leaves)
        for n, operand in zip(self.at, operands, strict=True):
            leaves[n] = operand
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        shardings = [
            (operand, layout.sharding)
            for operand, layout in zip(operands, self.layouts, strict=True)
            if not is_uneven(operand) and _on_mesh(layout)
        ]
        with recorded_shardings(shardings):
            outputs = any_mesh(self.verb)(*args, **kwargs)
            if results is not None:
                results[:] = map(_layout, jax.tree.leaves(outputs, is_leaf=is_uneven))
            return outputs

    def _entered(self, arrays: Sequence[Any]) -> list[Any]:
        return [
            layout.wrap(array, layout.shape, _valid(layout)) if layout.uneven else array
            for array, layout in zip(arrays, self.layouts, strict=True)
        ]

    def _with_two_bodies(self, shapes: Sequence[Any]) -> Callable[..., Any]:
        even = [_blocks(layout) for layout in self.layouts]

        def unsharded(*arrays: Any) -> Any:
            outputs = self._on_blocks(*map(_packed, arrays, self.layouts))
            return jax.tree.map(
                lambda x: unpack(x) if is_uneven(x) else x, outputs, is_leaf=is_uneven
            )

        def rule(*operands: Any) -> Any:
            if not all(map(_matches, operands, self.layouts)):
                return NotImplemented  # this program has it in another sharding
            return self._on_blocks(*self._entered([padded_of(operand) for operand in operands]))

        def run(*arrays: Any) -> Any:
            placed = [
                array if layout is None else lay_in_blocks(array, layout)
                for array, layout in zip(arrays, even, strict=True)
            ]
            closed, tree = trace(in_blocks(unsharded, rule), shapes)
            return jax.tree.unflatten(tree, jaxpr_as_fun(closed)(*placed))

        return run


def _typed_mesh(leaf: Any) -> Mesh | None:
    mesh = leaf.mesh if isinstance(leaf, NamedSharding) else leaf
    return mesh if isinstance(mesh, Mesh) and is_typed(mesh) else None


def _under_auto(leaf: Any) -> Any:
    if isinstance(leaf, NamedSharding):
        return on_mesh(leaf, auto(leaf.mesh))
    return auto(leaf) if isinstance(leaf, Mesh) else leaf


def _packed(array: Any, layout: ArrayLayout) -> Any:
    return pack(array, layout.mesh, layout.sharding, _valid(layout)) if layout.uneven else array


def _matches(operand: Any, layout: ArrayLayout) -> bool:
    if not is_uneven(operand):
        return not layout.uneven
    sizes = zip(operand.sizes, layout.sizes, strict=True)
    padded = tuple(operand.array.shape) == layout.buffer
    return padded and all(have is None or have == declared for have, declared in sizes)


def _valid(layout: ArrayLayout) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(size if layout.padded(axis) else None for axis, size in enumerate(layout.sizes))


def _blocks(layout: ArrayLayout) -> BlockLayout | None:
    """Equal blocks as a layout with sizes, so that a program keeps them; None if replicated."""
    if not _on_mesh(layout) or not any(len(size) > 1 for size in layout.sizes):
        return None
    sizes = tuple(size if len(size) > 1 else None for size in layout.sizes)
    return BlockLayout(layout.sharding, layout.shape, layout.buffer, sizes)


def _on_mesh(layout: ArrayLayout) -> bool:
    return layout.mesh is not None and layout.mesh.size > 1


def _layout(result: Any) -> Any:
    if is_uneven(result):
        return BlockLayout.of(result) if result.layout else None
    return closed_sharding_of(result)


def _is_data(leaf: Any) -> bool:
    """Whether it is a JAX array that torch can represent: any but a key."""
    return isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _tensor(leaf: Any) -> torch.Tensor:
    return leaf if isinstance(leaf, torch.Tensor) else to_torch(leaf)


def _key(leaf: Any) -> Any:
    """The cache key of a constant: PRNG keys by identity (the call owns them); 1 is not True."""
    return id(leaf) if isinstance(leaf, jax.Array) else (type(leaf), leaf)
