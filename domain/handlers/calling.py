"""A call of a handler: `jax.shard_map` over blocks, results checked before anything runs.

The handler is traced twice for each new combination of shapes, layouts and constants: once to learn
the shardings of its results, and once for the program. Padding is zero when a handler gets it,
and in results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from isoshard.core.kit import ArrayLayout, ShardingError

from .handler_arguments import Arguments
from .handler_shards import Shards
from .results import Result, check_results, read_results

Handler = Callable[..., tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Handled:
    """A handler, with the function that it replaces. Hashable.

    Attributes:
        name: of the function.
        handler: called as `handler(shards, *args, **kwargs)`.
        expected: gives the shapes and dtypes of the function's own results for such arguments;
            None if they are not to be compared.
        prove: whether JAX has to see that results called unsplit along a mesh axis are so.
    """

    name: str
    handler: Handler
    expected: Callable[..., Any] | None
    prove: bool


@dataclasses.dataclass(frozen=True)
class HandlerCall:
    """The shardings of a call's results, known before it runs.

    Attributes:
        results: one per leaf.
        structure: the tree they are leaves of.
    """

    results: tuple[Result, ...]
    structure: Any


def plan(handled: Handled, arguments: Arguments, arrays: Sequence[Any]) -> HandlerCall:
    """Infer the shardings of a handler's results; nothing is computed."""
    layouts = arguments.arrays()
    calls: list[HandlerCall] = []

    def probe(*blocks: Any) -> tuple[()]:
        _, results, structure = _run(handled, arguments, blocks)
        calls[:] = [HandlerCall(tuple(results), structure)]
        return ()

    jax.eval_shape(_mapped(probe, handled, arguments, ()), *arrays)
    planned = calls[0]
    if handled.expected is None:
        return planned
    args, kwargs = arguments.filled(_shapes(arrays, layouts))
    expected = handled.expected(*args, **kwargs)
    structure = check_results(planned.results, planned.structure, expected, handled.name)
    return HandlerCall(planned.results, structure)


def call(handled: Handled, arguments: Arguments, arrays: Sequence[Any]) -> Any:
    """Run a handler on the blocks of arrays; to be traced."""
    planned = plan(handled, arguments, arrays)
    arrays = [
        lax.with_sharding_constraint(array, layout.sharding)
        for array, (_, layout) in zip(arrays, arguments.arrays(), strict=True)
    ]

    def run(*blocks: Any) -> list[Any]:
        return _run(handled, arguments, blocks)[0]

    outs = [result.spec for result in planned.results]
    try:
        blocks = _mapped(run, handled, arguments, outs)(*arrays)
    except ValueError as error:
        if "statically inferred" not in str(error):
            raise
        raise ShardingError(_unproved(handled.name, error)) from None
    mesh = mesh_of_call(arguments)
    leaves = [
        result.global_array(x, mesh) for x, result in zip(blocks, planned.results, strict=True)
    ]
    return jax.tree.unflatten(planned.structure, leaves)


def mesh_of_call(arguments: Arguments) -> Mesh:
    """The mesh of arguments of which one is split."""
    assert arguments.mesh is not None
    return arguments.mesh


def _run(
    handled: Handled, arguments: Arguments, blocks: Sequence[Any]
) -> tuple[list[Any], list[Result], Any]:
    """The handler on one device: local results without padding, their shardings, and their tree."""
    mesh, layouts = mesh_of_call(arguments), arguments.arrays()
    bare = Shards(mesh, dict(layouts), {})
    clean = [
        _zeroed(block, bare, path, layout)
        for block, (path, layout) in zip(blocks, layouts, strict=True)
    ]
    args, kwargs = arguments.filled(clean)
    shards = Shards(
        mesh, dict(layouts), dict(zip([path for path, _ in layouts], clean, strict=True))
    )
    returned = handled.handler(shards, *args, **kwargs)
    local, results, structure = read_results(returned, mesh, handled.name)
    return (
        [_finished(x, r, shards) for x, r in zip(local, results, strict=True)],
        results,
        structure,
    )


def _mapped(
    body: Callable[..., Any], handled: Handled, arguments: Arguments, outs: Any
) -> Callable[..., Any]:
    return jax.shard_map(
        body,
        mesh=mesh_of_call(arguments),
        in_specs=tuple(layout.sharding.spec for _, layout in arguments.arrays()),
        out_specs=outs,
        check_vma=handled.prove,
    )


def _shapes(arrays: Sequence[Any], layouts: Sequence[tuple[Any, ArrayLayout]]) -> list[Any]:
    return [
        jax.ShapeDtypeStruct(layout.shape, array.dtype)
        for array, (_, layout) in zip(arrays, layouts, strict=True)
    ]


def _zeroed(block: Any, shards: Shards, path: Any, layout: ArrayLayout) -> Any:
    """A block with zeros for padding; through them no gradient flows."""
    for axis in range(len(layout.sizes)):
        if layout.padded(axis):
            block = _masked(block, shards.valid(path, axis), axis)
    return block


def _finished(local: Any, result: Result, shards: Shards) -> Any:
    for axis, sizes in enumerate(result.sizes):
        if sizes is not None and any(size != local.shape[axis] for size in sizes):
            size = jnp.asarray(sizes, jnp.int32)[shards.index(result.names[axis])]
            rows = jnp.arange(local.shape[axis], dtype=jnp.int32)
            local = _masked(local, rows < size, axis)
    return local


def _masked(block: Any, valid: Any, axis: int) -> Any:
    mask = valid.reshape((-1,) + (1,) * (block.ndim - axis - 1))
    return jnp.where(mask, block, jnp.zeros((), block.dtype))


def _unproved(name: str, error: ValueError) -> str:
    lines = [line for line in str(error).splitlines() if "out_specs" in line and "is P" in line]
    reason = f" ({'; '.join(line.strip() for line in lines)})" if lines else ""
    return (
        f"the handler of {name} returned a spec by which a result is the same on all devices of a "
        f"mesh axis, and JAX cannot prove it{reason}: reduce it with shards.all_reduce, name the "
        "axis in the spec, or, if you know that it is the same, register with prove=False"
    )
