"""Create a model already sharded: no device ever stores an unsharded parameter.

>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> mesh = make_mesh((2, 4), ("data", "model"))
>>> init = lambda key: {"w": jax.random.normal(key, (64, 256)), "b": jnp.zeros(256)}
>>> params = create_sharded(init, mesh, Plan({"w": (None, "model")}), jax.random.key(0))
>>> params["w"].sharding.shard_shape((64, 256))
(64, 64)

The function is traced once. What it computes then runs under `jit` with the plan's shardings as
`out_shardings`, so each device computes only its shards. Random bits are written out as arithmetic
(see `random_bits`), so they need no memory of their own. A large model is computed in several
programs, the largest arrays first, as an initialiser may need temporaries larger than its results.

An initialiser that XLA cannot partition is computed unsharded on every device: `orthogonal` is
one, as it factorises the whole matrix. The counter "peak_bytes" has the most a device allocated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from isoshard.core.frameworks import framework_of
from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.mesh import as_mesh
from isoshard.core.layout.on_auto_axes import axes_of, on_auto_axes
from isoshard.core.plan.unused_rules import warn_unused
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals.jaxpr_classes import jaxpr_as_fun

from .graphs import join, split
from .layout import LEFT_OUT, mesh_first, named_boxes, plan_state
from .random_bits import write_out

_GROUPS = 16
"""Into how many programs the creation of a large model is divided, about."""

_SMALL = 4 << 20
"""Bytes per device up to which arrays are created by one program."""


def create_sharded(
    fn: Callable[..., Any], mesh: Any = LEFT_OUT, plan: Any = LEFT_OUT, *args: Any
) -> Any:
    """Run an initialiser so that each result is created directly in its shards.

    Args:
        fn: returns the model: a pytree of arrays (e.g. `linen_model.init`), a Flax NNX module, or
            an Equinox module. It is traced, under Auto axes, so random keys and `nnx.Rngs` are
            created inside or passed as `args`.
        mesh: the mesh, of any axis types, or what `as_mesh` takes. May be left out
            (`create_sharded(fn, plan, *args)`) where `jax.set_mesh` has set one.
        plan: a `Plan`, or one spec for every leaf.
        *args: arguments of `fn`, pytrees of arrays.

    Returns:
        What `fn` returns, each leaf sharded by the plan. Values equal those of
        `jax.jit(fn)(*args)`.

    Raises:
        ShardingError: there is no mesh, or it has no devices.
        PlanError: the plan does not fit the leaves; nothing was computed.

    Example:
        >>> from flax import nnx
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.plan import Plan
        >>> make = lambda: nnx.Linear(16, 64, rngs=nnx.Rngs(0))
        >>> model = create_sharded(make, make_mesh((8,), ("x",)), Plan({"kernel": (None, "x")}))
        >>> model.kernel.sharding.spec
        P(None, 'x')
    """
    call = "iso.create_sharded(fn, mesh, plan, *args)"
    mesh_arg, plan, *inputs = mesh_first(call, mesh, plan, *args)
    if framework_of(fn) is not None:
        raise TypeError(
            f"create_sharded takes the function that creates the model, and got a "
            f"{type(fn).__name__}: call {call} with fn=lambda: {type(fn).__name__}(..); shard a "
            "model that exists with iso.shard(model, mesh, plan)"
        )
    graph, mesh = None, as_mesh(mesh_arg)

    def state_of(*args: Any) -> Any:
        nonlocal graph
        graph, state = split(fn(*args))
        return state

    def layouts(shapes: Any) -> Any:
        warn_unused(plan, named_boxes(shapes))
        return plan_state(shapes, mesh, plan)

    state = create_in_shards(state_of, layouts, *inputs)
    return join(graph, state)


def create_in_shards(fn: Callable[..., Any], layouts_of: Callable[[Any], Any], *args: Any) -> Any:
    """Run a function so that each array it returns is created directly in its shards.

    Args:
        fn: returns a pytree of arrays. It is traced once, under Auto axes.
        layouts_of: called with what `fn` returns as shapes; returns a NamedSharding for each.
        *args: arguments of `fn`, pytrees of arrays.

    Returns:
        What `fn` returns, sharded.

    Example:
        >>> import jax.numpy as jnp
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.layout.spec import named_sharding
        >>> rows = named_sharding(("x",), make_mesh((8,), ("x",)), 1)
        >>> create_in_shards(lambda: [jnp.arange(8)], lambda shapes: [rows])[0].sharding.spec
        P('x',)
    """
    traced, shapes = jax.make_jaxpr(on_auto_axes(fn), return_shape=True)(*args)
    layouts = jax.tree.leaves(layouts_of(shapes))
    leaves, structure = jax.tree.flatten(shapes)
    with axes_of(auto(jax.sharding.get_abstract_mesh())):
        run = jaxpr_as_fun(write_out(traced))
    inputs = jax.tree.leaves(args)
    arrays: dict[int, jax.Array] = {}
    allocated = 0
    for group in _groups([_size(a, layout) for a, layout in zip(leaves, layouts, strict=True)]):
        results, size, needed = _compute(run, group, [layouts[i] for i in group], inputs)
        metrics.record_peak(allocated + needed)
        allocated += size
        arrays.update(zip(group, results, strict=True))
    return structure.unflatten(arrays[i] for i in range(len(leaves)))


def _compute(
    run: Callable[..., Sequence[Any]],
    group: list[int],
    layouts: list[NamedSharding],
    inputs: list[Any],
) -> tuple[list[jax.Array], int, int]:
    """Some results of a traced function, their bytes per device, and what the program needed."""
    start = time.perf_counter()

    def some(*inputs: Any) -> list[Any]:
        results = run(*inputs)
        return [results[i] for i in group]

    with axes_of(layouts[0].mesh):
        program = jax.jit(some, out_shardings=layouts).lower(*inputs).compile()
    seconds = time.perf_counter() - start
    where = metrics.user_location()
    metrics.record_compilation(f"creation of {len(group)} arrays", "first call", where, seconds)
    with axes_of(layouts[0].mesh):
        results = program(*inputs)
    memory = program.memory_analysis()
    if memory is None:  # not reported on this platform
        return results, 0, 0
    size = memory.output_size_in_bytes
    return results, size, size + memory.temp_size_in_bytes + memory.argument_size_in_bytes


def _groups(sizes: list[int]) -> Iterator[list[int]]:
    """Which arrays are created together: the largest first."""
    limit = max(_SMALL, sum(sizes) // _GROUPS)
    group: list[int] = []
    total = 0
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if group and total + sizes[index] > limit:
            yield group
            group, total = [], 0
        group.append(index)
        total += sizes[index]
    if group:
        yield group


def _size(array: Any, layout: NamedSharding) -> int:
    """Bytes of one shard."""
    return math.prod(layout.shard_shape(array.shape)) * array.dtype.itemsize
