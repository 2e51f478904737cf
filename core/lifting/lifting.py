"""Lifting: a function written for arrays, called with arrays in blocks of any sizes.

>>> import numpy as np
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> mesh = make_mesh((4,), ("x",))
>>> u = shard(np.arange(18.0, dtype=np.float32), mesh, ("x",), uneven="pad", sizes=(5, 2, 7, 4))
>>> round(lift(lambda x: x.var())(u).item(), 3)
26.917
>>> scaled = lift(jax.nn.softmax)(u)
>>> scaled.sizes, scaled.sharding.spec
(((5, 2, 7, 4),), P('x',))

The function is traced at the true shapes, so that means divide by the true counts and shapes are
the author's; the jaxpr is then interpreted on the padded arrays, primitive by primitive:

- elementwise primitives as they are, and matrix products with zeros for padding;
- reductions (so softmax, var, norms) with padding replaced by the identity;
- convolutions, windows, running sums, slices, padding and concatenation by halo exchange
  (`window_rules`, `movement_rules`): no axis is gathered;
- where order matters otherwise (sort, indexing, steps, a reshape of the axis), and in primitives
  without a rule, at the true shape, which gathers that axis on every device.

A function may define itself on blocks: `in_blocks`.

A result is an `UnevenArray` where an axis keeps its blocks; its padding is zero. Otherwise it
is a plain array. Gradients have the arguments' shardings, and zeros in the padding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.blocks.any_mesh import any_mesh
from isoshard.core.blocks.block_values import Frame, Value, as_value
from isoshard.core.blocks.hints import hints_of, sharding_from
from isoshard.core.blocks.interpreting import interpret_program, trace
from isoshard.core.blocks.traced_shardings import WithLayout, inside, record_shardings, sharding_of
from isoshard.core.blocks.uneven_values import frame_of
from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import describe_mesh
from isoshard.core.layout.spec import named_sharding
from isoshard.core.layout.uneven import UnevenArray, is_uneven
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.exact_keys import exact

from . import rules as rules


@dataclasses.dataclass(frozen=True)
class _Static:
    """An argument that is no array; 1, 1.0 and True are three."""

    value: Any = dataclasses.field(compare=False)
    key: Any


def lift(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lift a function of arrays to arrays in blocks.

    Args:
        function: written for unsharded `jax.Array`s and traceable by `jax.jit`; of arrays, trees of
            them, numbers and other hashable objects. What is no array and no float is static.

    Returns:
        A function of the same arguments, each array of which may be an `UnevenArray` or not.
        Compiled per shapes and sizes: keep it, rather than lift in a loop. It works
        inside `jax.jit`, `jax.grad` and `jax.vjp`.

    Raises:
        ShardingError: when called: arguments are on different meshes, or are batched by `jax.vmap`.
        TypeError: when called: an argument is neither an array nor hashable.

    Example:
        >>> lift(lambda x, y: x @ y)(np.ones((2, 3)), np.ones(3)).tolist()    # nothing in blocks
        [3.0, 3.0]
    """

    def run(call: Any, arrays: Sequence[Any]) -> Any:
        structure, frames = call
        values = [_enter(x, frame) for x, frame in zip(arrays, _dynamic(frames), strict=True)]
        shapes = [_shape(value) for value in values]

        def unpacked(*arrays: Any) -> Any:
            remaining = iter(arrays)
            leaves = [
                frame.value if isinstance(frame, _Static) else next(remaining) for frame in frames
            ]
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return function(*args, **kwargs)

        closed, out = trace(unpacked, shapes)
        results = interpret_program(closed, values)
        return jax.tree.unflatten(out, [_leave(value) for value in results])

    compiled = jax.jit(run, static_argnums=0)

    @any_mesh
    @functools.wraps(function)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_uneven)
        _check_meshes(leaves)
        frames = tuple(map(_frame, leaves))
        arrays = [
            leaf.array if is_uneven(leaf) else leaf
            for leaf, frame in zip(leaves, frames, strict=True)
            if not isinstance(frame, _Static)
        ]
        return record_shardings(compiled((structure, frames), arrays))

    return lifted


def _frame(leaf: Any) -> Any:
    """The static part of an argument; None for a plain array."""
    if is_uneven(leaf):
        return frame_of(leaf)
    if isinstance(leaf, Tracer) and inside() and (sharding := sharding_of(leaf)) is not None:
        return Frame((None,) * leaf.ndim, hints_of(sharding, leaf.ndim))
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | float | complex):
        return None
    try:
        hash(leaf)
    except TypeError:
        raise TypeError(
            f"an argument of a lifted function is a {type(leaf).__name__}, which is neither an "
            "array nor hashable; pass an array, or close over it"
        ) from None
    return _Static(leaf, exact(leaf))


def _dynamic(frames: Sequence[Any]) -> list[Any]:
    return [frame for frame in frames if not isinstance(frame, _Static)]


def _enter(x: Any, frame: Frame | None) -> Value:
    return as_value(x) if frame is None else frame.of(x).placed().with_zeros()


def _leave(value: Value) -> Any:
    if not value.uneven:
        return WithLayout(value.array, sharding_from(value.splits, value.hints, P.UNCONSTRAINED))
    value = value.with_zeros().placed()
    sizes = [None if split is None else split.sizes for split in value.splits]
    return UnevenArray(value.array, value.shape, sizes, _layout(value))


def _layout(value: Value) -> NamedSharding | None:
    """The known sharding; other axes count as unsplit."""
    sharding = sharding_from(value.splits, value.hints, None)
    if sharding is None:
        return None
    return named_sharding(sharding.spec, sharding.mesh, len(value.splits))


def _shape(value: Value) -> jax.ShapeDtypeStruct:
    weak = getattr(value.array, "weak_type", False)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=weak)


def _check_meshes(leaves: Sequence[Any]) -> None:
    meshes: dict[Any, None] = {}
    for leaf in leaves:
        if is_uneven(leaf) and leaf.sharding is not None:
            if isinstance(leaf.sharding, NamedSharding):
                meshes[leaf.sharding.mesh] = None
    if len(meshes) > 1:
        described = "; ".join(describe_mesh(mesh) for mesh in meshes)
        raise ShardingError(
            f"the arguments are on {len(meshes)} different meshes: {described}. Move them to one: "
            "iso.reshard(x, mesh, spec)."
        )
