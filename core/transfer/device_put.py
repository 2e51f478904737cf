"""Put arrays, trees of arrays and modules on the devices of a mesh: `shard`, `reshard`, `full`.

>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> a = shard(np.ones((8, 4), np.float32), mesh, P("x", None))
>>> a.sharding.spec, reshard(a, (None, "y")).sharding.spec, full(a).sharding.spec
(P('x',), P(None, 'y'), P())

Trees take one spec for all leaves, a tree of specs (which may be a prefix: a spec applies to all
leaves below it), or a `Plan`:

>>> params = {"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32)}
>>> placed = shard(params, mesh, {"w": P("x", "y"), "b": None})
>>> jax.tree.map(lambda leaf: leaf.sharding.spec, placed)
{'b': P(), 'w': P('x', 'y')}

Every leaf is checked before any is put on devices, and all errors are in one message:

>>> shard(params, mesh, P("z"))
Traceback (most recent call last):
    ...
isoshard.core.errors.SpecError: 2 leaves cannot be sharded, and nothing was changed:
  b: spec P('z',) does not fit: no mesh axis is called 'z'. The mesh axes are 'x' (2), 'y' (4): name them, or give their indices 0..1.
  w: spec P('z',) does not fit: no mesh axis is called 'z'. The mesh axes are 'x' (2), 'y' (4): name them, or give their indices 0..1.

Arrays are what `jnp.asarray` takes: NumPy's float64, a list of numbers, a number. Inside a tree,
leaves that are no arrays are returned unchanged, and a `jax.ShapeDtypeStruct` gets the sharding
that its array would have:

>>> state = {"step": 0, "w": np.ones((8, 4)), "ema": jax.ShapeDtypeStruct((8, 4), "float32")}
>>> placed = shard(state, mesh, P("x", "y"))
>>> placed["step"], placed["w"].dtype, placed["ema"].sharding.spec
(0, dtype('float32'), P('x', 'y'))

Objects of a framework with a bridge (torch tensors, modules of torch and Flax) are handed to it.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from isoshard.core import extensions
from isoshard.core.deprecations import accepts_old
from isoshard.core.errors import ShardingError, raise_collected
from isoshard.core.frameworks import framework_of
from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.layout.partial_sums import unreduced
from isoshard.core.layout.spec import is_spec
from isoshard.core.layout.tree_mesh import common_mesh
from isoshard.core.layout.uneven import UnevenArray, is_uneven
from isoshard.core.plan import Plan
from isoshard.core.plan.unused_rules import warn_unused
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals import distributed_state, is_distributed
from isoshard.core.runtime._jax_internals.tracers import Tracer

from .array_like import (
    AnyArray,
    AnyTree,
    ArrayT,
    K,
    Kept,
    NumberT,
    from_literal,
    hidden_array,
    is_array,
    is_literal,
)
from .leaf_specs import NamedArray, named_arrays, set_specs
from .memory_kinds import in_kind, kind_of
from .multihost_check import checked_across_hosts
from .reshard import reshard_array
from .reshard_cache import cached_sharding
from .shard_arguments import LEFT_OUT, check_uneven, mesh_and_spec, mesh_last, new_mesh_and_spec

_KEEP_MEMORY: Any = object()
Check = Literal["values", "off"]


@overload
def shard(
    x: AnyArray | list[NumberT],
    mesh: Any = None,
    spec: Any = ...,
    *,
    copy: bool | None = None,
    name: str | None = None,
    uneven: Literal["error"] = "error",
    sizes: None = None,
    memory: str | None = None,
    check: Check = "values",
) -> jax.Array: ...
@overload
def shard(
    x: dict[K, ArrayT],
    mesh: Any = None,
    spec: Any = ...,
    *,
    copy: bool | None = None,
    name: str | None = None,
    uneven: Literal["error"] = "error",
    sizes: None = None,
    memory: str | None = None,
    check: Check = "values",
) -> dict[K, jax.Array]: ...
@overload
def shard(
    x: list[ArrayT],
    mesh: Any = None,
    spec: Any = ...,
    *,
    copy: bool | None = None,
    name: str | None = None,
    uneven: Literal["error"] = "error",
    sizes: None = None,
    memory: str | None = None,
    check: Check = "values",
) -> list[jax.Array]: ...
@overload
def shard(
    x: UnevenArray,
    mesh: Any = None,
    spec: Any = ...,
    *,
    copy: bool | None = None,
    name: str | None = None,
    uneven: Literal["error"] = "error",
    sizes: None = None,
    memory: str | None = None,
    check: Check = "values",
) -> jax.Array | UnevenArray: ...
@overload
def shard(
    x: AnyTree,
    mesh: Any = None,
    spec: Any = ...,
    *,
    copy: bool | None = None,
    name: str | None = None,
    uneven: Literal["error"] = "error",
    sizes: None = None,
    memory: str | None = None,
    check: Check = "values",
) -> Any: ...
@overload
def shard(
    x: Kept,
    mesh: Any = None,
    spec: Any = ...,
    *,
    copy: bool | None = None,
    name: str | None = None,
    uneven: Literal["error"] = "error",
    sizes: None = None,
    memory: str | None = None,
    check: Check = "values",
) -> Kept: ...
@overload
def shard(
    x: AnyArray,
    mesh: Any = None,
    spec: Any = ...,
    *,
    copy: bool | None = None,
    name: str | None = None,
    uneven: str,
    sizes: Any = None,
    memory: str | None = None,
    check: Check = "values",
) -> jax.Array | UnevenArray: ...
@overload
def shard(
    x: Any,
    mesh: Any = None,
    spec: Any = ...,
    *,
    copy: bool | None = None,
    name: str | None = None,
    uneven: str,
    sizes: Any = None,
    memory: str | None = None,
    check: Check = "values",
) -> Any: ...
def shard(
    x: Any,
    mesh: Any = None,
    spec: Any = LEFT_OUT,
    *,
    copy: bool | None = None,
    name: str | None = None,
    uneven: str = "error",
    sizes: Any = None,
    memory: str | None = None,
    check: Check = "values",
) -> Any:
    """Shard `x` over a mesh: an array, a tensor, a module or a tree of those.

    Example:
        >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
        >>> shard(np.ones((8, 4), np.float32), mesh, P("data")).sharding.spec
        P('data',)
        >>> params = {"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32)}
        >>> placed = shard(params, mesh, Plan({"w": P(None, "model"), "*": P()}))
        >>> placed["w"].sharding.spec, placed["b"].sharding.spec
        (P(None, 'model'), P())

    Args:
        x: a NumPy or JAX array, a pytree of arrays, or an object of a framework with a bridge.
            On its own, a number or a list or tuple of only numbers is an array. In a tree a leaf
            that is no array (a Python number too) is returned unchanged. 64-bit floats are rounded
            to 32 bits while `jax_enable_x64` is off, as `jnp.asarray` does; integers that do not
            fit raise. Both copy, and are counted as "narrowed" in `metrics`.
        mesh: the mesh, of any axis types, or what `as_mesh` takes. May be left out (`shard(x,
            spec)`) where `jax.set_mesh` has set one, or `spec` is a NamedSharding.
        spec: any spelling of a spec, a tree of them for a tree, or a Plan. In a tree of specs,
            write leaves as P(..): a tuple of names, indices and None is one spec for all.
        copy: None may share memory with `x` or copy (a later write to a NumPy array then shows),
            False shares or raises, True copies.
        name: of `x`, for messages; a tree's leaves are called `name.path`.
        uneven: for axes that do not divide: "error", or "pad" for an `UnevenArray`, or a torch
            tensor over one. Axes that divide are not padded.
        sizes: with uneven="pad", of one array: the elements of each block, where one axis is split;
            or per axis None or that. By default as `torch.chunk`.
        memory: the memory kind, as JAX names it: "pinned_host" is the host's. By default that of
            a NamedSharding or of the plan, else the devices' default.
        check: over several processes, "values" has those of the mesh compare their arguments, by
            one short message with names, shapes, dtypes, specs and a checksum of the values, so
            all of them must call this. With "off" nothing is compared.

    Returns:
        The same kind of object, on this mesh: NumPy and JAX arrays give a jax.Array, trees a tree
        of the same structure, frameworks their own, a `jax.ShapeDtypeStruct` one with the sharding,
        also over an abstract mesh. A jax.Array with that very sharding is returned as it is. In a
        JAX transformation a value is constrained; over Explicit axes the sharding is part of its
        type (`jax.typeof`).

    Raises:
        ShardingError: a spec does not fit its leaf (SpecError, UnevenError), memory cannot be
            shared (CopyError), or `jax.shard_map` runs over the axes. Nothing has been changed.
        DistributedError: the processes passed different arguments, or one did not call this.
        TypeError: `x` is no array, nor a tree.

    Example with blocks of unequal sizes:
        >>> rows = np.ones(18, np.float32)
        >>> shard(rows, jax.make_mesh((4,), ("x",)), P("x"), uneven="pad", sizes=(5, 2, 7, 4))
        UnevenArray(float32[18] in float32[28], axis 0 in blocks of 7: 5, 2, 7, 4 valid; P('x',))
    """
    plain = copy is None and sizes is None and memory is None and uneven == "error"
    if plain and isinstance(x, jax.Array):
        move = cached_sharding(x, mesh, spec)
        if move is not None:
            return x if move is x.sharding else jax.device_put(x, move)
    if check != "off" and (
        check != "values" or (is_distributed() and distributed_state.num_processes > 1)
    ):
        options = {"uneven": uneven, "sizes": sizes, "memory": memory, "check": check}
        put = partial(shard, x, mesh, spec, **{**options, "check": "off"}, copy=copy, name=name)
        return checked_across_hosts(x, mesh, spec, options, copy, name, put)
    if spec is LEFT_OUT or not isinstance(mesh, Mesh):
        mesh, spec = mesh_and_spec(mesh, spec)
    if uneven != "error" or sizes is not None:
        check_uneven(uneven, sizes, memory)
    framework = framework_of(x)
    if framework is None or uneven == "pad" or not framework.warns_of_rules:
        warn_unused(spec, x)
    if framework is not None:
        if uneven == "pad":
            return framework.shard_padded(x, mesh, spec, sizes, copy=copy, name=name)
        if memory is not None:
            spec = in_kind(spec, mesh, getattr(x, "ndim", None), memory, name or framework.name)
        return framework.shard(x, mesh, spec, copy=copy, name=name)
    if is_literal(x):
        x, copy = from_literal(x, copy, name or "array"), None
    if uneven == "pad":
        return extensions.shard_padded(x, mesh, spec, sizes, copy, name)
    if isinstance(x, UnevenArray):
        return extensions.reshard_uneven(x, spec, mesh)
    if isinstance(x, np.ndarray | jax.Array) and is_spec(spec):
        kind = kind_of(x) if memory is _KEEP_MEMORY else memory
        spec = in_kind(spec, mesh, x.ndim, kind, name or "array")
        return NamedArray("", name or "array", x, None, spec).put(mesh, copy)
    leaves, structure = named_arrays(x, name)
    set_specs(leaves, structure, mesh, spec, name)
    for leaf in leaves:
        rank = None if leaf.shape is None else len(leaf.shape)
        kind = kind_of(leaf.value) if memory is _KEEP_MEMORY else memory
        leaf.spec = in_kind(leaf.spec, mesh, rank, kind, leaf.name)
    errors = [leaf.check(mesh, copy) for leaf in leaves]
    raise_collected([error for error in errors if error is not None])
    return jax.tree.unflatten(structure, [leaf.put(mesh, copy) for leaf in leaves])


@overload
def reshard(
    x: AnyArray | list[NumberT], mesh: Any = ..., spec: Any = ..., *, memory: str | None = None
) -> jax.Array: ...
@overload
def reshard(
    x: dict[K, ArrayT], mesh: Any = ..., spec: Any = ..., *, memory: str | None = None
) -> dict[K, jax.Array]: ...
@overload
def reshard(
    x: list[ArrayT], mesh: Any = ..., spec: Any = ..., *, memory: str | None = None
) -> list[jax.Array]: ...
@overload
def reshard(
    x: UnevenArray, mesh: Any = ..., spec: Any = ..., *, memory: str | None = None
) -> jax.Array | UnevenArray: ...
@overload
def reshard(x: AnyTree, mesh: Any = ..., spec: Any = ..., *, memory: str | None = None) -> Any: ...
@overload
def reshard(x: Kept, mesh: Any = ..., spec: Any = ..., *, memory: str | None = None) -> Kept: ...
@accepts_old(mesh_last)
def reshard(
    x: Any, mesh: Any = LEFT_OUT, spec: Any = LEFT_OUT, *, memory: str | None = None
) -> Any:
    """Change the sharding of `x`; data moves between devices as needed.

    Example:
        >>> rows = shard(np.ones((8, 4), np.float32), jax.make_mesh((4,), ("x",)), P("x"))
        >>> reshard(rows, P(None, "x")).sharding.shard_shape((8, 4))
        (8, 1)

    Args:
        x: as for `shard`, sharded already unless `mesh` is given.
        mesh: the new mesh. May be left out (`reshard(x, spec)`): by default the one `x` is on, else
            the one that `jax.set_mesh` has set. The mesh of a traced value on Auto axes is not
            always available.
        spec: as for `shard`. A NamedSharding includes its mesh.
        memory: as for `shard`; by default the memory kind is kept.

    Returns:
        The same kind of object; buffers that need not move are shared with `x`. An UnevenArray
        keeps the sizes of its blocks if their number is the same; other axes that do not
        divide get those of `torch.chunk`; without padding the result is a jax.Array.

    Raises:
        ShardingError: a spec does not fit, or `x` has no mesh, or several.
        TypeError: `x` is no array, nor a tree.
    """
    mesh, spec = new_mesh_and_spec(mesh, spec)
    if isinstance(x, UnevenArray):
        return extensions.reshard_uneven(x, spec, mesh)
    framework = framework_of(x)
    if framework is not None:
        warn_unused(spec, x)
        if memory is not None:
            mesh = framework.sharding_of(x).mesh if mesh is None else mesh
            spec = in_kind(spec, mesh, getattr(x, "ndim", None), memory, framework.name)
        return framework.reshard(x, mesh, spec)
    mesh = common_mesh(x) if mesh is None else mesh
    if memory is None and not isinstance(spec, NamedSharding | Plan):
        memory = kind_of(x) if isinstance(x, jax.Array) else _KEEP_MEMORY
    return shard(x, mesh, spec, memory=memory)


@overload
def full(x: jax.Array | UnevenArray) -> jax.Array: ...
@overload
def full(x: Kept) -> Kept: ...
def full(x: Any) -> Any:
    """Replicate `x` on every device of its mesh; counted as "gathers" in `metrics`.

    Args:
        x: a jax.Array, a pytree of them, or an object of a framework with a bridge. Leaves of a
            tree that are no arrays are returned unchanged.

    Returns:
        The same kind of object, replicated. A replicated array, or one on a single device, is
        returned as it is. An UnevenArray gives a jax.Array of its true shape.

    Raises:
        ShardingError: a leaf is on several devices without a mesh.
        TypeError: `x` is no jax.Array, or a leaf is in host memory.

    Example:
        >>> full(shard(np.ones(8, np.float32), jax.make_mesh((4,), ("x",)), P("x"))).sharding.spec
        P()
    """
    framework = framework_of(x)
    if framework is not None:
        return framework.full(x)
    return _map_arrays(_gather, x, "full")


def sharding_of(x: Any) -> Any:
    """The sharding of `x`.

    Args:
        x: a jax.Array, a `jax.ShapeDtypeStruct` with a sharding, a pytree of them, or an object of
            a framework with a bridge.

    Returns:
        A NamedSharding, or a tree of them, with None for a leaf that is no array. An array on one
        device has the spec P() over a mesh of that device, whose one axis is called "device".

    Raises:
        ShardingError: the array is traced on other than Explicit axes, or is on several devices
            without a mesh; or a struct has no sharding.
        TypeError: `x` is no array, or a leaf is in host memory, which has no sharding.

    Example:
        >>> sharding_of(jax.numpy.ones(3)).mesh.axis_names
        ('device',)
    """
    framework = framework_of(x)
    if framework is not None:
        return framework.sharding_of(x)
    return _map_arrays(_sharding_of, x, "sharding_of")


def _map_arrays(function: Callable[[Any], Any], x: Any, verb: str) -> Any:
    """Apply a function to every array of a tree, after checking all leaves."""

    def is_passthrough(leaf: Any) -> bool:
        is_value = leaf is x or is_array(leaf) or is_uneven(leaf) or framework_of(leaf) is not None
        return not is_value and not hidden_array(leaf)

    wrong = []
    for path, leaf in jax.tree.leaves_with_path(x, is_leaf=is_uneven):
        if is_uneven(leaf) or isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            continue
        if framework_of(leaf) is None and not is_passthrough(leaf):
            wrong.append(f"{path_name(path) or 'the argument'} is {type(leaf).__name__}")
    if wrong:
        raise TypeError(
            f"{verb} takes arrays on devices: {'; '.join(wrong)}. Shard it first: "
            "iso.shard(x, mesh, spec)."
        )
    verbs = {"full": full, "sharding_of": sharding_of}

    def apply(leaf: Any) -> Any:
        if is_uneven(leaf):
            return function(leaf) if verb == "full" else function(leaf.array)
        if is_passthrough(leaf):
            return leaf if verb == "full" else None
        return function(leaf) if is_array(leaf) else verbs[verb](leaf)

    return jax.tree.map(apply, x, is_leaf=is_uneven)


def _gather(x: Any) -> Any:
    if is_uneven(x):
        return extensions.gather_uneven(x, _sharding_of(x.array))
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=NamedSharding(_sharding_of(x).mesh, P()))
    if not isinstance(x, Tracer) and x.is_fully_replicated and not unreduced(x.sharding):
        return x  # unreduced() because in JAX 0.9 unreduced arrays are "fully replicated"
    replicated = NamedSharding(_sharding_of(x).mesh, P())
    metrics.count("gathers")
    return reshard_array(x, replicated)


def _sharding_of(x: Any) -> NamedSharding:
    if isinstance(x, Tracer):
        sharding = jax.typeof(x).sharding
        if sharding.mesh.manual_axes:
            raise ShardingError(
                "inside jax.shard_map a value is one device's block, which has no sharding over "
                f"{', '.join(map(repr, sharding.mesh.manual_axes))}; call this outside, or read "
                "in_specs"
            )
        if sharding.mesh.axis_names and sharding.mesh.are_all_axes_explicit:
            return sharding
        raise ShardingError(
            "a traced value on Auto axes has no sharding yet, the compiler chooses it; constrain "
            "it with iso.shard(x, mesh, spec), or call this outside jit"
        )
    if isinstance(x.sharding, NamedSharding):
        return x.sharding
    if isinstance(x.sharding, SingleDeviceSharding):
        return NamedSharding(Mesh(np.array(list(x.sharding.device_set)), ("device",)), P())
    if x.sharding is None:
        raise ShardingError(
            f"a jax.ShapeDtypeStruct of shape {x.shape} has no sharding; give it one: "
            "iso.shard(x, mesh, spec)"
        )
    raise ShardingError(
        f"an array of shape {x.shape} is on several devices by a {type(x.sharding).__name__}, "
        "which has no mesh; shard it with iso.reshard(x, mesh, spec)"
    )
