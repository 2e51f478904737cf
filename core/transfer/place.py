"""Place: lay arrays, trees of arrays and modules out over a mesh.

>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> a = shard(np.ones((8, 4), np.float32), mesh, P("x", None))
>>> a.sharding.spec, reshard(a, (None, "y")).sharding.spec, full(a).sharding.spec
(P('x',), P(None, 'y'), P())

Trees take one spec for all leaves, a tree of specs (which may stop early: a spec stands for all
below it), or a `Plan`:

>>> params = {"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32)}
>>> placed = shard(params, mesh, {"w": P("x", "y"), "b": None})
>>> jax.tree.map(lambda leaf: leaf.sharding.spec, placed)
{'b': P(), 'w': P('x', 'y')}

Every leaf is checked before one is placed, and all faults come in one error:

>>> shard(params, mesh, P("z"))
Traceback (most recent call last):
    ...
isoshard.core.errors.SpecError: 2 leaves cannot be laid out, and nothing was changed:
  b: spec P('z',) does not fit: no mesh axis is called 'z'. The mesh axes are 'x' (2), 'y' (4): name them, or give their indices 0..1.
  w: spec P('z',) does not fit: no mesh axis is called 'z'. The mesh axes are 'x' (2), 'y' (4): name them, or give their indices 0..1.

What `jnp.asarray` takes for an array is one: NumPy's float64, a list of numbers, a number. Inside a
tree, what is no array stays what it is, and a `jax.ShapeDtypeStruct` gets the layout that its array
would have:

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

from isoshard.core.deprecations import accepts_old
from isoshard.core.errors import ShardingError, raise_collected
from isoshard.core.frameworks import framework_of
from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.layout.partial_sums import unreduced
from isoshard.core.layout.spec import is_spec
from isoshard.core.layout.tree_mesh import one_mesh
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
from .given_by_ranks import place_alike
from .leaf_specs import NamedArray, assign, named_arrays
from .memory_kinds import in_kind, kind_of
from .relayout import lay_out
from .remembered_moves import known_move
from .shard_arguments import (
    LEFT_OUT,
    check_uneven,
    mesh_and_spec,
    mesh_last,
    new_mesh_and_spec,
)
from .unequal_blocks import block_verbs

_AS_IT_IS: Any = object()
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
    """Lay `x` out over a mesh: an array, a tensor, a module or a tree of those.

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
            Alone, a number or a list or tuple of nothing but numbers is an array. In a tree a
            leaf that is no array (a Python number too) stays what it is. Floats of 64 bits are
            rounded to 32 while `jax_enable_x64` is off, as `jnp.asarray` rounds them; integers
            that do not fit are refused. Both copy, and are counted as "narrowed" in `metrics`.
        mesh: the mesh, of any axis types, or what `as_mesh` takes. May be left out (`shard(x,
            spec)`) where `jax.set_mesh` has set one, or `spec` is a NamedSharding.
        spec: any spelling of a spec, a tree of them for a tree, or a Plan. In a tree of specs,
            write leaves as P(..): a tuple of names, indices and None is one spec for all.
        copy: None may share memory with `x` or copy (a later write to a NumPy array then shows),
            False shares or raises, True copies.
        name: of `x`, for messages; a tree's leaves are called `name.path`.
        uneven: of axes that do not divide: "error", or "pad" for an `UnevenArray`, or a torch
            tensor over one. What divides is laid out as ever.
        sizes: with uneven="pad", of one array: the elements of each block, where one axis is split;
            or per axis None or that. By default as `torch.chunk`.
        memory: in which memory of the devices, as JAX names it: "pinned_host" is the host's. By
            default that of a NamedSharding or of the plan, else the one they compute in.
        check: over several processes, "values" has those of the mesh compare what they are given,
            by one short message: names, shapes, dtypes, layout and a sum over the values' bits,
            so all of them call this. With "off" nobody is asked, and nobody looks.

    Returns:
        The same kind of object, on the mesh that was given: NumPy and JAX arrays give a jax.Array,
        trees a tree of the same structure, frameworks their own, a `jax.ShapeDtypeStruct` one with
        the layout, also over an abstract mesh. A jax.Array of that very layout is given back as it
        is. In a JAX transformation a value is constrained; along Explicit axes its type says so
        (`jax.typeof`).

    Raises:
        ShardingError: a spec does not fit its leaf (SpecError, UnevenError), memory cannot be
            shared (CopyError), or `jax.shard_map` runs over the axes. Nothing has been changed.
        DistributedError: the processes were given different things, or one did not come.
        TypeError: `x` is no array, nor a tree.

    Example with blocks of unequal sizes:
        >>> rows = np.ones(18, np.float32)
        >>> shard(rows, jax.make_mesh((4,), ("x",)), P("x"), uneven="pad", sizes=(5, 2, 7, 4))
        UnevenArray(float32[18] in float32[28], axis 0 in blocks of 7: 5, 2, 7, 4 valid; P('x',))
    """
    plain = copy is None and sizes is None and memory is None and uneven == "error"
    if plain and isinstance(x, jax.Array):
        move = known_move(x, mesh, spec)
        if move is not None:
            return x if move is x.sharding else jax.device_put(x, move)
    if check != "off" and (
        check != "values" or (is_distributed() and distributed_state.num_processes > 1)
    ):
        options = {"uneven": uneven, "sizes": sizes, "memory": memory, "check": check}
        place = partial(shard, x, mesh, spec, **{**options, "check": "off"}, copy=copy, name=name)
        return place_alike(x, mesh, spec, options, copy, name, place)
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
        return block_verbs().shard_padded(x, mesh, spec, sizes, copy, name)
    if isinstance(x, UnevenArray):
        return block_verbs().reshard_uneven(x, spec, mesh)
    if isinstance(x, np.ndarray | jax.Array) and is_spec(spec):
        kind = kind_of(x) if memory is _AS_IT_IS else memory
        spec = in_kind(spec, mesh, x.ndim, kind, name or "array")
        return NamedArray("", name or "array", x, None, spec).place(mesh, copy)
    leaves, structure = named_arrays(x, name)
    assign(leaves, structure, mesh, spec, name)
    for leaf in leaves:
        rank = None if leaf.shape is None else len(leaf.shape)
        kind = kind_of(leaf.value) if memory is _AS_IT_IS else memory
        leaf.spec = in_kind(leaf.spec, mesh, rank, kind, leaf.name)
    faults = [leaf.check(mesh, copy) for leaf in leaves]
    raise_collected([fault for fault in faults if fault is not None])
    return jax.tree.unflatten(structure, [leaf.place(mesh, copy) for leaf in leaves])


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
    """Change the layout of `x`; data moves between devices as needed.

    Example:
        >>> rows = shard(np.ones((8, 4), np.float32), jax.make_mesh((4,), ("x",)), P("x"))
        >>> reshard(rows, P(None, "x")).sharding.shard_shape((8, 4))
        (8, 1)

    Args:
        x: as for `shard`, laid out already unless `mesh` is given.
        mesh: the new mesh. May be left out (`reshard(x, spec)`): by default the one `x` is on, else
            the one that `jax.set_mesh` has set. A traced value on Auto axes does not always know
            its own.
        spec: as for `shard`. A NamedSharding brings its mesh along.
        memory: as for `shard`; by default data stays in the memory it is in.

    Returns:
        The same kind of object; what is where it belongs is shared with `x`. An UnevenArray keeps
        the sizes of its blocks where as many are asked for; other axes that do not divide get those
        of `torch.chunk`; if nothing is padded any more, it is a jax.Array.

    Raises:
        ShardingError: a spec does not fit, or there is no mesh to stay on, or several.
        TypeError: `x` is no array, nor a tree.
    """
    mesh, spec = new_mesh_and_spec(mesh, spec)
    if isinstance(x, UnevenArray):
        return block_verbs().reshard_uneven(x, spec, mesh)
    framework = framework_of(x)
    if framework is not None:
        warn_unused(spec, x)
        if memory is not None:
            mesh = framework.sharding_of(x).mesh if mesh is None else mesh
            spec = in_kind(spec, mesh, getattr(x, "ndim", None), memory, framework.name)
        return framework.reshard(x, mesh, spec)
    mesh = one_mesh(x) if mesh is None else mesh
    if memory is None and not isinstance(spec, NamedSharding | Plan):
        memory = kind_of(x) if isinstance(x, jax.Array) else _AS_IT_IS
    return shard(x, mesh, spec, memory=memory)


@overload
def full(x: jax.Array | UnevenArray) -> jax.Array: ...
@overload
def full(x: Kept) -> Kept: ...
def full(x: Any) -> Any:
    """Gather `x` whole to every device of its mesh; counted as "gathers" in `metrics`.

    Args:
        x: a jax.Array, a pytree of them, or an object of a framework with a bridge. What is no
            array in a tree stays what it is.

    Returns:
        The same kind of object, replicated. What is replicated already, or on one device, is
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
    """Read the layout of `x`.

    Args:
        x: a jax.Array, a `jax.ShapeDtypeStruct` with a layout, a pytree of them, or an object of
            a framework with a bridge.

    Returns:
        A NamedSharding, or a tree of them, with None for a leaf that is no array. An array on one
        device has the spec P() over a mesh of that device, whose one axis is called "device".

    Raises:
        ShardingError: the array is traced on other than Explicit axes, or is on several devices
            without a mesh; or a struct has no layout.
        TypeError: `x` is no array, or a leaf is in host memory, which has no layout.

    Example:
        >>> sharding_of(jax.numpy.ones(3)).mesh.axis_names
        ('device',)
    """
    framework = framework_of(x)
    if framework is not None:
        return framework.sharding_of(x)
    return _map_arrays(_sharding_of, x, "sharding_of")


def _map_arrays(function: Callable[[Any], Any], x: Any, verb: str) -> Any:
    """Apply to every array of a tree, after a look at all of them."""

    def stays(leaf: Any) -> bool:
        alone = leaf is x or is_array(leaf) or is_uneven(leaf) or framework_of(leaf) is not None
        return not alone and not hidden_array(leaf)

    wrong = []
    for path, leaf in jax.tree.leaves_with_path(x, is_leaf=is_uneven):
        if is_uneven(leaf) or isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            continue
        if framework_of(leaf) is None and not stays(leaf):
            wrong.append(f"{path_name(path) or 'the argument'} is {type(leaf).__name__}")
    if wrong:
        raise TypeError(
            f"{verb} takes arrays that lie on devices: {'; '.join(wrong)}. Lay it out first: "
            "iso.shard(x, mesh, spec)."
        )
    verbs = {"full": full, "sharding_of": sharding_of}

    def one(leaf: Any) -> Any:
        if is_uneven(leaf):
            return function(leaf) if verb == "full" else function(leaf.array)
        if stays(leaf):
            return leaf if verb == "full" else None
        return function(leaf) if is_array(leaf) else verbs[verb](leaf)

    return jax.tree.map(one, x, is_leaf=is_uneven)


def _gather(x: Any) -> Any:
    if is_uneven(x):
        return block_verbs().gather(x, _sharding_of(x.array))
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=NamedSharding(_sharding_of(x).mesh, P()))
    if not isinstance(x, Tracer) and x.is_fully_replicated and not unreduced(x.sharding):
        return x  # (to JAX 0.9 terms of sums are replicated)
    whole = NamedSharding(_sharding_of(x).mesh, P())
    metrics.count("gathers")
    return lay_out(x, whole)


def _sharding_of(x: Any) -> NamedSharding:
    if isinstance(x, Tracer):
        told = jax.typeof(x).sharding
        if told.mesh.manual_axes:
            raise ShardingError(
                "inside jax.shard_map a value is one device's block, which has no layout along "
                f"{', '.join(map(repr, told.mesh.manual_axes))}; ask outside, or read in_specs"
            )
        if told.mesh.axis_names and told.mesh.are_all_axes_explicit:
            return told
        raise ShardingError(
            "a traced value on Auto axes has no layout yet, the compiler chooses it; constrain it "
            "with iso.shard(x, mesh, spec), or ask outside jit"
        )
    if isinstance(x.sharding, NamedSharding):
        return x.sharding
    if isinstance(x.sharding, SingleDeviceSharding):
        return NamedSharding(Mesh(np.array(list(x.sharding.device_set)), ("device",)), P())
    if x.sharding is None:
        raise ShardingError(
            f"a jax.ShapeDtypeStruct of shape {x.shape} has no layout; give it one: "
            "iso.shard(x, mesh, spec)"
        )
    raise ShardingError(
        f"an array of shape {x.shape} lies on several devices by a {type(x.sharding).__name__}, "
        "which has no mesh; lay it out with iso.reshard(x, mesh, spec)"
    )
