"""Results of torch code on the user's mesh: what gives each its layout, and so its type.

Torch code that JAX calls runs under Auto axes. The layout of a result is given, in this order, by

1. `jax_function(.., out_sharding=..)`;
2. the torch code: a mark on the very tensor (`xs.mark_sharding`, or the activations of a plan); the
   new buffers that `with_buffers` gives have the layouts of those it was given;
3. the compiler. Outside of JAX's transformations the result has been computed, and has a layout.
   Inside, Shardy is asked for those of this function's results alone; see `propagated_layouts`.

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

from .convert import Result, Said
from .propagated_layouts import propagated
from .users_mesh import mesh_of_leaf, of_type, under_auto_axes

Code = Callable[[Any, Said], Any]


@dataclasses.dataclass(frozen=True)
class _As:
    """That a result has an argument's layout, along Explicit axes at least."""

    sharding: NamedSharding


def computed(
    code: Code,
    given: PyTree,
    mesh: AnyMesh | None,
    layouts: Callable[[Any], Any],
    what: str,
) -> Any:
    """Run torch code under Auto axes, and hand its results out on the user's mesh.

    Args:
        code: takes what was given, with arrays under Auto axes, and by their `id` the layouts that
            they have on the user's mesh; returns a pytree with a `Result` for each tensor.
        given: a pytree of arrays, also traced, and of anything else.
        mesh: the user's; None if it has no Explicit axes.
        layouts: is given what `code` returned, and says what is declared of each leaf.
        what: is called, for messages.

    Returns:
        The results, with arrays for tensors.

    Raises:
        ShardingError: a result cannot have the layout declared, or nobody gives one.
    """
    leaves, structure = jax.tree.flatten(given, is_leaf=is_uneven)
    in_trace = any(map(_is_traced, leaves)) or _is_traced(jnp.zeros(()))
    numbers = [n for n, leaf in enumerate(leaves) if _is_traced(leaf)]
    types = [_type_of(leaf) for leaf in leaves]
    homes = [] if mesh else [home for home in map(mesh_of_leaf, leaves) if home is not None]
    call = _TypedCall(what, mesh, *homes[:1])

    def run(*traced: Any) -> list[Any]:
        held = [_held(leaf) for leaf in leaves]
        for number, tracer in zip(numbers, traced, strict=True):
            held[number] = tracer
        said = {id(one): kind for one, kind in zip(held, types, strict=True) if kind is not None}
        return call.found(code(jax.tree.unflatten(structure, held), said), layouts)

    with under_auto_axes(mesh) if mesh is not None else under_auto_axes():
        traced = _under_auto([_held(leaves[number]) for number in numbers], what)
        if mesh is not None and in_trace:
            program = jax.make_jaxpr(run)(*traced)
            kinds = [types[number] for number in numbers]
            values = _values(program, traced)
            call.complete(values, lambda: _chosen(program, kinds, mesh, what))
        else:
            values = run(*traced)
    return call.results(values)


def _values(program: ClosedJaxpr, inputs: Sequence[Any]) -> Sequence[Any]:
    return jaxpr_as_fun(program)(*inputs)


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, Tracer)


def _under_auto(values: list[Any], what: str) -> list[Any]:
    try:
        return [under_auto(value) for value in values]
    except ValueError:
        if not manual_axes():
            raise
        raise ShardingError(
            f"{what}: jax.shard_map over {', '.join(map(repr, manual_axes()))} outside of jax.jit "
            "leaves Explicit axes over that JAX cannot take a value off op by op; call the mapped "
            "function under jax.jit."
        ) from None


class _TypedCall:
    """The results of one call, and their layouts."""

    def __init__(self, what: str, mesh: AnyMesh | None, home: AnyMesh | None = None):
        self._what = what
        self._mesh: Any = mesh
        self._home = mesh or home

    def found(self, results: PyTree, layouts: Callable[[Any], Any]) -> list[Any]:
        """The arrays among the results."""
        pairs, self._structure = pytree.tree_flatten_with_path(results)
        names = [f"result{pytree.keystr(path)} of {self._what}" for path, _ in pairs]
        declared = layouts(results)
        self._leaves = [leaf.array if isinstance(leaf, Result) else leaf for _, leaf in pairs]
        self._are_arrays = [isinstance(leaf, jax.Array) for leaf in self._leaves]
        arrays = [leaf for leaf in self._leaves if isinstance(leaf, jax.Array)]
        self._said = [
            self._layout(said, leaf, array, name)
            for said, (_, leaf), array, name, is_array in zip(
                declared, pairs, self._leaves, names, self._are_arrays, strict=True
            )
            if is_array
        ]
        return arrays

    def complete(self, values: Sequence[Any], chosen: Callable[[], list[P]]) -> None:
        """Ask the compiler about the results that nobody has spoken of."""
        open_ = [
            said is None and isinstance(v, Tracer)
            for said, v in zip(self._said, values, strict=True)
        ]
        specs = [P()] * len(values)
        if any(is_open and value.ndim for is_open, value in zip(open_, values, strict=True)):
            specs = chosen()
        for number, is_open in enumerate(open_):
            if is_open:
                self._said[number] = _As(NamedSharding(self._mesh, specs[number]))

    def results(self, values: Sequence[Any]) -> Any:
        """The tree, with the arrays on the user's mesh."""
        arrays = iter(
            [self._laid(value, said) for value, said in zip(values, self._said, strict=True)]
        )
        filled = [
            next(arrays) if is_array else leaf
            for leaf, is_array in zip(self._leaves, self._are_arrays, strict=True)
        ]
        return pytree.tree_unflatten(filled, self._structure)

    def _layout(self, declared: Any, leaf: Any, array: Any, name: str) -> Any:
        """What is said of a result by anyone but the compiler."""
        if isinstance(declared, _As):
            return declared
        if declared is not None:
            told = isinstance(declared, NamedSharding) and self._goes(declared.mesh)
            mesh: Any = declared.mesh if told else self._home or ambient_mesh(_DECLARE)
            found = named_sharding(declared, mesh, array.ndim, shape=array.shape, name=name)
            return declared if told else found
        mark = leaf.mark if isinstance(leaf, Result) else None
        if mark is None or not _divides(mark, array.shape):
            return None
        if self._mesh is None:
            in_the_program = isinstance(array, Tracer) and not is_typed(mark.mesh)
            return None if in_the_program else mark
        if self._goes(mark.mesh):
            return on_mesh(mark, self._mesh)
        return named_sharding(mark, self._mesh, array.ndim)

    def _goes(self, mesh: AnyMesh) -> bool:
        return self._mesh is None or same_grid(mesh, self._mesh)

    def _laid(self, value: Any, said: Any) -> Any:
        if isinstance(said, _As):
            return of_type(value, said.sharding)
        if said is not None:
            is_traced = isinstance(value, Tracer) or not isinstance(said.mesh, jax.sharding.Mesh)
            return constrain(value, said) if is_traced else reshard_array(value, said)
        if self._mesh is None or not isinstance(self._mesh, jax.sharding.Mesh):
            return value
        mesh = mesh_of_leaf(value)
        return retyped(value, self._mesh) if mesh and same_grid(mesh, self._mesh) else value


def as_given(array: ArrayLike) -> Any:
    """What gives a result an argument's layout."""
    found = _type_of(array)
    return None if found is None else _As(found)


def spread(declared: SpecLike, results: PyTree, what: str) -> list[Any]:
    """What is declared of each result.

    Args:
        declared: a PartitionSpec, a NamedSharding or None for all; or a tree of them.
        results: the tree of them.
        what: is called, for messages.

    Raises:
        ShardingError: the tree is another than that of the results.
    """
    structure = pytree.tree_structure(results)
    if _is_layout(declared):
        return [declared] * structure.num_leaves
    leaves, given = pytree.tree_flatten(declared, is_leaf=_is_layout)
    if given != structure or not all(map(_is_layout, leaves)):
        raise ShardingError(
            f"out_sharding of {what} is {declared}, and the results are nested as {structure}: "
            "give one PartitionSpec or NamedSharding for all of them, or a tree as theirs, with "
            "None where the compiler may choose"
        )
    return leaves


_DECLARE = "iso.jax_function(f, out_sharding=NamedSharding(mesh, P('x')))"


def _is_layout(thing: Any) -> bool:
    return thing is None or isinstance(thing, P | NamedSharding)


def _type_of(leaf: Any) -> NamedSharding | None:
    """The layout of an argument on a mesh with Explicit axes."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, UnevenArray):
        return None
    mesh = mesh_of_leaf(leaf)
    if mesh is None or not is_typed(mesh):
        return None
    found: Any = jax.typeof(leaf).sharding if isinstance(leaf, Tracer) else leaf.sharding
    return found


def _held(leaf: Any) -> Any:
    """An argument that is not traced, under Auto axes, also while JAX traces."""
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


def _chosen(
    program: ClosedJaxpr, types: Sequence[NamedSharding | None], mesh: AnyMesh, what: str
) -> list[P]:
    """How the compiler lays out the results of a program alone.

    Raises:
        ShardingError: it cannot be compiled alone.
    """
    axes = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Manual
    ]
    named = [one for one in program.effects if type(one).__name__ == "NamedAxisEffect"]
    if axes or named:
        where = f"in jax.shard_map over {axes}" if axes else f"with the effects {named}"
        raise ShardingError(
            f"{what} is called {where}, where the compiler cannot be asked for the layouts of "
            "its results; say them: iso.jax_function(f, out_sharding=P(..)), or mark the tensors: "
            "xs.mark_sharding(t, mesh, spec)"
        )
    grid = auto(mesh.abstract_mesh)
    lie = [*map(_type_of_constant, program.consts), *types]
    avals = [*map(jax.typeof, program.consts), *program.in_avals]
    shapes = [
        jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, sharding=None if one is None else NamedSharding(grid, one.spec)
        )
        for aval, one in zip(avals, lie, strict=True)
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
