"""Results of torch code on the user's mesh: the sharding of each, and so its type.

Torch code that JAX calls runs under Auto axes. The sharding of a result comes, in this order, from

1. `jax_function(.., out_sharding=..)`;
2. the torch code: a mark on the tensor itself (`xs.mark_sharding`, or a plan's activations); the
   new buffers that `with_buffers` returns have the shardings of those that it was called with;
3. the compiler. Outside of JAX's transformations the result has been computed, and has a sharding.
   Inside, Shardy propagates shardings over this function alone; see `propagated_layouts`.

Along Explicit axes that is the result's type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import (
    AnyMesh,
    auto,
    constrain,
    is_typed,
    on_mesh,
    retyped,
    same_grid,
    under_auto,
)
from isoshard.core.layout.in_shard_map import manual_axes
from isoshard.core.layout.mesh import ambient_mesh
from isoshard.core.layout.spec import SpecLike, named_sharding
from isoshard.core.layout.uneven import UnevenArray, is_uneven
from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr, jaxpr_as_fun
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.jaxprs import closed, opened
from isoshard.core.transfer.exchange import reshard_array
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.common.argument_types import ArrayLike, PyTree

from .convert import Result, ShardingById
from .propagated_layouts import propagated
from .users_mesh import mesh_of_leaf, of_type, under_auto_axes

Code = Callable[[Any, ShardingById], Any]


@dataclasses.dataclass(frozen=True)
class _OfType:
    """The type of a result: its sharding, along Explicit axes at least."""

    sharding: NamedSharding


def call_under_auto(
    code: Code,
    arguments: PyTree,
    mesh: AnyMesh | None,
    layouts: Callable[[Any], Any],
    name: str,
) -> Any:
    """Run torch code under Auto axes, and return its results on the user's mesh.

    Args:
        code: takes the arguments, with arrays under Auto axes, and by their `id` the shardings that
            they have on the user's mesh; returns a pytree with a `Result` for each tensor.
        arguments: a pytree of arrays, also traced, and of anything else.
        mesh: the user's; None if it has no Explicit axes.
        layouts: takes what `code` returned; returns the declared sharding of each leaf.
        name: of the function, for messages.

    Raises:
        ShardingError: a result cannot have the declared sharding, or has none inside `shard_map`.
    """
    leaves, structure = jax.tree.flatten(arguments, is_leaf=is_uneven)
    in_trace = any(map(_is_traced, leaves)) or _is_traced(jnp.zeros(()))
    indices = [n for n, leaf in enumerate(leaves) if _is_traced(leaf)]
    types = [_type_of(leaf) for leaf in leaves]
    meshes = [] if mesh else [m for m in map(mesh_of_leaf, leaves) if m is not None]
    call = _TypedCall(name, mesh, *meshes[:1])

    def run(*traced: Any) -> list[Any]:
        operands = [_under_auto_now(leaf) for leaf in leaves]
        for index, tracer in zip(indices, traced, strict=True):
            operands[index] = tracer
        shardings = {
            id(operand): kind
            for operand, kind in zip(operands, types, strict=True)
            if kind is not None
        }
        return call.arrays_of(code(jax.tree.unflatten(structure, operands), shardings), layouts)

    with under_auto_axes(mesh) if mesh is not None else under_auto_axes():
        traced = _under_auto([_under_auto_now(leaves[index]) for index in indices], name)
        if mesh is not None and in_trace:
            program = jax.make_jaxpr(run)(*traced)
            kinds = [types[index] for index in indices]
            values = jaxpr_as_fun(program)(*traced)
            call.complete(values, lambda: _compiler_specs(program, kinds, mesh, name))
        else:
            values = run(*traced)
    return call.results(values)


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, Tracer)


def _under_auto(values: list[Any], name: str) -> list[Any]:
    try:
        return [under_auto(value) for value in values]
    except ValueError:
        if not manual_axes():
            raise
        raise ShardingError(
            f"{name}: jax.shard_map over {', '.join(map(repr, manual_axes()))} outside of jax.jit "
            "leaves Explicit axes, which JAX cannot make Auto op by op; call the mapped function "
            "under jax.jit."
        ) from None


class _TypedCall:
    """The results of one call, and their layouts."""

    def __init__(self, name: str, mesh: AnyMesh | None, fallback_mesh: AnyMesh | None = None):
        self._name = name
        self._mesh: Any = mesh
        self._fallback_mesh = mesh or fallback_mesh

    def arrays_of(self, results: PyTree, layouts: Callable[[Any], Any]) -> list[Any]:
        """The arrays among the results."""
        pairs, self._structure = pytree.tree_flatten_with_path(results)
        names = [f"result{pytree.keystr(path)} of {self._name}" for path, _ in pairs]
        declared = layouts(results)
        self._leaves = [leaf.array if isinstance(leaf, Result) else leaf for _, leaf in pairs]
        self._are_arrays = [isinstance(leaf, jax.Array) for leaf in self._leaves]
        arrays = [leaf for leaf in self._leaves if isinstance(leaf, jax.Array)]
        self._layouts = [
            self._layout(layout, leaf, array, name)
            for layout, (_, leaf), array, name, is_array in zip(
                declared, pairs, self._leaves, names, self._are_arrays, strict=True
            )
            if is_array
        ]
        return arrays

    def complete(self, values: Sequence[Any], chosen: Callable[[], list[P]]) -> None:
        """Take the compiler's shardings for the results without a declared one."""
        open_ = [
            layout is None and isinstance(v, Tracer)
            for layout, v in zip(self._layouts, values, strict=True)
        ]
        specs = [P()] * len(values)
        if any(is_open and value.ndim for is_open, value in zip(open_, values, strict=True)):
            specs = chosen()
        for index, is_open in enumerate(open_):
            if is_open:
                self._layouts[index] = _OfType(NamedSharding(self._mesh, specs[index]))

    def results(self, values: Sequence[Any]) -> Any:
        """The tree, with the arrays on the user's mesh."""
        arrays = iter(
            [
                self._placed(value, layout)
                for value, layout in zip(values, self._layouts, strict=True)
            ]
        )
        filled = [
            next(arrays) if is_array else leaf
            for leaf, is_array in zip(self._leaves, self._are_arrays, strict=True)
        ]
        return pytree.tree_unflatten(filled, self._structure)

    def _layout(self, declared: Any, leaf: Any, array: Any, name: str) -> Any:
        """The declared sharding of a result: by the caller, or by a mark; else None."""
        if isinstance(declared, _OfType):
            return declared
        if declared is not None:
            is_on_mesh = isinstance(declared, NamedSharding) and self._is_on_grid(declared.mesh)
            mesh: Any = (
                declared.mesh if is_on_mesh else self._fallback_mesh or ambient_mesh(_DECLARE)
            )
            sharding = named_sharding(declared, mesh, array.ndim, shape=array.shape, name=name)
            return declared if is_on_mesh else sharding
        mark = leaf.mark if isinstance(leaf, Result) else None
        if mark is None or not _divides(mark, array.shape):
            return None
        if self._mesh is None:
            in_the_program = isinstance(array, Tracer) and not is_typed(mark.mesh)
            return None if in_the_program else mark
        if self._is_on_grid(mark.mesh):
            return on_mesh(mark, self._mesh)
        return named_sharding(mark, self._mesh, array.ndim)

    def _is_on_grid(self, mesh: AnyMesh) -> bool:
        return self._mesh is None or same_grid(mesh, self._mesh)

    def _placed(self, value: Any, layout: Any) -> Any:
        if isinstance(layout, _OfType):
            return of_type(value, layout.sharding)
        if layout is not None:
            is_traced = isinstance(value, Tracer) or not isinstance(layout.mesh, jax.sharding.Mesh)
            return constrain(value, layout) if is_traced else reshard_array(value, layout)
        if self._mesh is None or not isinstance(self._mesh, jax.sharding.Mesh):
            return value
        mesh = mesh_of_leaf(value)
        return retyped(value, self._mesh) if mesh and same_grid(mesh, self._mesh) else value


def like_argument(array: ArrayLike) -> Any:
    """A declaration that a result has the sharding of an argument."""
    sharding = _type_of(array)
    return None if sharding is None else _OfType(sharding)


def declared_layouts(declared: SpecLike, results: PyTree, name: str) -> list[Any]:
    """The declared sharding of each result.

    Args:
        declared: a PartitionSpec, a NamedSharding or None for all; or a tree of them.
        results: the tree of them.
        name: of the function, for messages.

    Raises:
        ShardingError: the tree is another than that of the results.
    """
    structure = pytree.tree_structure(results)
    if _is_layout(declared):
        return [declared] * structure.num_leaves
    leaves, declared_structure = pytree.tree_flatten(declared, is_leaf=_is_layout)
    if declared_structure != structure or not all(map(_is_layout, leaves)):
        raise ShardingError(
            f"out_sharding of {name} is {declared}, and the results are nested as {structure}: "
            "give one PartitionSpec or NamedSharding for all of them, or a tree as theirs, with "
            "None where the compiler may choose"
        )
    return leaves


_DECLARE = "iso.jax_function(f, out_sharding=NamedSharding(mesh, P('x')))"


def _is_layout(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, P | NamedSharding)


def _type_of(leaf: Any) -> NamedSharding | None:
    """The layout of an argument on a mesh with Explicit axes."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, UnevenArray):
        return None
    mesh = mesh_of_leaf(leaf)
    if mesh is None or not is_typed(mesh):
        return None
    sharding: Any = jax.typeof(leaf).sharding if isinstance(leaf, Tracer) else leaf.sharding
    return sharding


def _under_auto_now(leaf: Any) -> Any:
    """A concrete array under Auto axes, also while JAX traces; anything else as it is."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer | UnevenArray):
        return leaf
    with jax.ensure_compile_time_eval():
        return under_auto(leaf)


def _divides(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def _compiler_specs(
    program: ClosedJaxpr, types: Sequence[NamedSharding | None], mesh: AnyMesh, name: str
) -> list[P]:
    """The specs that the compiler chooses for the results of a program compiled alone.

    Raises:
        ShardingError: it cannot be compiled alone.
    """
    axes = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Manual
    ]
    named = [effect for effect in program.effects if type(effect).__name__ == "NamedAxisEffect"]
    if axes or named:
        where = f"in jax.shard_map over {axes}" if axes else f"with the effects {named}"
        raise ShardingError(
            f"{name} is called {where}, where the compiler cannot choose the shardings of its "
            "results alone; give them: iso.jax_function(f, out_sharding=P(..)), or mark the "
            "tensors: xs.mark_sharding(t, mesh, spec)"
        )
    grid = auto(mesh.abstract_mesh)
    shardings = [*map(_type_of_constant, program.consts), *types]
    avals = [*map(jax.typeof, program.consts), *program.in_avals]
    shapes = [
        jax.ShapeDtypeStruct(
            aval.shape,
            aval.dtype,
            sharding=None if sharding is None else NamedSharding(grid, sharding.spec),
        )
        for aval, sharding in zip(avals, shardings, strict=True)
    ]
    count = len(program.consts)

    def alone(*arrays: Any) -> list[Any]:
        return jaxpr_as_fun(closed(opened(program), arrays[:count]))(*arrays[count:])

    device = grid.abstract_device  # which in JAX 0.9 has no platform
    return propagated(alone, shapes, getattr(device, "platform", jax.default_backend()))


def _type_of_constant(array: Any) -> NamedSharding | None:
    """The layout of a constant."""
    if isinstance(array, Tracer) or not isinstance(array, jax.Array):
        return _type_of(array)
    return array.sharding if isinstance(array.sharding, NamedSharding) else None
