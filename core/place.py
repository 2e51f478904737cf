"""Place: lay arrays, trees of arrays and modules out over a mesh.

>>> from isoshard.core.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> a = shard(np.ones((8, 4), np.float32), mesh, P("x", None))
>>> sharding_of(a).spec
P('x',)
>>> sharding_of(reshard(a, (None, "y"))).spec
P(None, 'y')
>>> sharding_of(full(a)).spec
P()

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

Under `jax.set_mesh` the mesh may be left out, and a spec is enough:

>>> with jax.set_mesh(jax.make_mesh((2, 4), ("x", "y"))):
...     jax.typeof(shard(np.ones((8, 4), np.float32), P("x", "y")))
ShapedArray(float32[8@x,4@y])

Objects of a framework with a bridge (torch tensors and modules, Flax modules) are handed to it.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from . import metrics
from .arrays import lay_out
from .axis_types import is_typed
from .errors import ShardingError, no_sharing, raise_collected
from .frameworks import framework_of
from .leaves import Leaf, assign, named_arrays
from .mesh import ambient_mesh, as_mesh, describe_mesh
from .paths import path_name
from .spec import is_spec, named_sharding
from .uneven import UnevenArray, is_uneven

_LEFT_OUT: Any = object()


def shard(
    x: Any,
    mesh: Any = None,
    spec: Any = _LEFT_OUT,
    *,
    copy: bool | None = None,
    name: str | None = None,
    uneven: str = "error",
    sizes: Any = None,
) -> Any:
    """Lay `x` out over a mesh.

    Args:
        x: a NumPy or JAX array, a pytree of arrays, or an object of a framework with a bridge.
        mesh: the mesh, of any axis types, or what `as_mesh` takes. May be left out (`shard(x,
            spec)`) where `jax.set_mesh` has set one, or `spec` is a NamedSharding.
        spec: any spelling of a spec, a tree of them for a tree, or a Plan. In a tree of specs,
            write leaves as P(..): a tuple of names, indices and None is one spec for all.
        copy: None may share memory with `x` or copy (a later write to a NumPy array then shows),
            False shares or raises, True copies.
        name: of `x`, for messages; a tree's leaves are called `name.path`.
        uneven: what becomes of arrays of which an axis does not divide: "error", or "pad" for an
            `UnevenArray`, or a torch tensor over one. What divides is laid out as ever.
        sizes: with uneven="pad", of one array: the elements of each block, where one axis is split;
            or per axis None or that. By default as `torch.chunk`.

    Returns:
        The same kind of object, on the mesh that was given: NumPy and JAX arrays give a jax.Array,
        trees a tree of the same structure, frameworks their own. In a JAX transformation a value is
        constrained; along Explicit axes its type says so (`jax.typeof`).

    Raises:
        ShardingError: a spec does not fit its leaf (SpecError, UnevenError), or memory cannot be
            shared (CopyError). Nothing has been changed then.
        TypeError: a leaf is no array.

    Example:
        >>> from isoshard.core.mesh import make_mesh
        >>> rows = np.ones(18, np.float32)
        >>> shard(rows, make_mesh((4,), ("x",)), P("x"), uneven="pad", sizes=(5, 2, 7, 4))
        UnevenArray(float32[18] in float32[28], axis 0 in blocks of 7: 5, 2, 7, 4 valid; P('x',))
    """
    mesh, spec = _mesh_and_spec(mesh, spec)
    _check_uneven(uneven, sizes)
    if uneven == "pad":
        return _shard_padded(x, mesh, spec, sizes, copy, name)
    if isinstance(x, UnevenArray):
        return _reshard_uneven(x, spec, mesh)
    framework = framework_of(x)
    if framework is not None:
        return framework.shard(x, mesh, spec, copy=copy, name=name)
    if isinstance(x, np.ndarray | jax.Array) and is_spec(spec):
        return Leaf("", name or "array", x, None, spec).place(mesh, copy)
    leaves, structure = named_arrays(x, name)
    assign(leaves, structure, mesh, spec, name)
    faults = [leaf.check(mesh, copy) for leaf in leaves]
    raise_collected([fault for fault in faults if fault is not None])
    return jax.tree.unflatten(structure, [leaf.place(mesh, copy) for leaf in leaves])


def reshard(x: Any, spec: Any, mesh: Mesh | None = None) -> Any:
    """Change the layout of `x`; data moves between devices as needed.

    Args:
        x: as for `shard`, laid out already unless `mesh` is given.
        spec: as for `shard`. A NamedSharding brings its mesh along.
        mesh: the new mesh; by default the one `x` is on, else the one that `jax.set_mesh` has set.

    Returns:
        The same kind of object; what is where it belongs is shared with `x`. An UnevenArray keeps
        the sizes of its blocks where as many are asked for; other axes that do not divide get those
        of `torch.chunk`; if nothing is padded any more, it is a jax.Array.

    Raises:
        ShardingError: a spec does not fit, or there is no mesh to stay on.
        TypeError: a leaf is no array.
    """
    if mesh is None and isinstance(spec, NamedSharding):
        mesh = spec.mesh
    if isinstance(x, UnevenArray):
        return _reshard_uneven(x, spec, mesh)
    framework = framework_of(x)
    if framework is not None:
        return framework.reshard(x, spec, mesh)
    return shard(x, _mesh_of(x) if mesh is None else mesh, spec)


def full(x: Any) -> Any:
    """Gather `x` whole to every device of its mesh; counted as "gathers" in `metrics`.

    Args:
        x: a jax.Array, a pytree of them, or an object of a framework with a bridge.

    Returns:
        The same kind of object, replicated. What is whole on every device already, or lies on one
        device, is returned as it is. An UnevenArray gives a jax.Array of its true shape.

    Raises:
        ShardingError: a leaf lies on several devices without a mesh.
        TypeError: a leaf is no jax.Array.
    """
    framework = framework_of(x)
    if framework is not None:
        return framework.full(x)
    return _map_arrays(_gather, x, "full")


def sharding_of(x: Any) -> Any:
    """Read the layout of `x`.

    Args:
        x: a jax.Array, a pytree of them, or an object of a framework with a bridge.

    Returns:
        A NamedSharding, or a tree of them. An array on one device has the spec P() over a mesh of
        that device, whose one axis is called "device".

    Raises:
        ShardingError: the array is traced on other than Explicit axes, or lies on several devices
            without a mesh.
        TypeError: a leaf is no jax.Array; a NumPy array has no layout.

    Example:
        >>> sharding_of(jax.numpy.ones(3)).mesh.axis_names
        ('device',)
    """
    framework = framework_of(x)
    if framework is not None:
        return framework.sharding_of(x)
    return _map_arrays(_sharding_of, x, "sharding_of")


def _mesh_and_spec(mesh: Any, spec: Any) -> tuple[Any, Any]:
    """Both, where one may have been left out."""
    if spec is _LEFT_OUT:
        if isinstance(mesh, Mesh | AbstractMesh) or hasattr(mesh, "get_jax_mesh"):
            raise TypeError(
                f"how is it to lie over the mesh {describe_mesh(as_mesh(mesh, abstract=True))}? "
                "Give a spec as well: iso.shard(x, mesh, P('x')), or P() for whole copies"
            )
        mesh, spec = None, mesh
    if mesh is None:
        mesh = spec.mesh if isinstance(spec, NamedSharding) else ambient_mesh()
    return as_mesh(mesh, abstract=True), spec


def _mesh_of(x: Any) -> Any:
    meshes: dict[Any, None] = {}
    for leaf in jax.tree.leaves(x):
        if isinstance(leaf, Tracer):
            mesh = jax.typeof(leaf).sharding.mesh
            meshes.update({mesh: None} if is_typed(mesh) else {})
        elif isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            meshes[leaf.sharding.mesh] = None
    if not meshes:
        return ambient_mesh("iso.reshard(x, spec, mesh)")
    if len(meshes) > 1:
        raise ShardingError(
            f"the arrays lie on {len(meshes)} different meshes; say which one to lay them out on: "
            "iso.reshard(x, spec, mesh)"
        )
    return next(iter(meshes))


def _check_uneven(uneven: str, sizes: Any) -> None:
    if uneven not in ("error", "pad"):
        raise ShardingError(f"uneven is 'error' or 'pad', given was {uneven!r}")
    if uneven == "error" and sizes is not None:
        raise ShardingError(
            f"sizes {sizes} are of blocks with padding; say that it is wanted: "
            "iso.shard(x, mesh, spec, uneven='pad', sizes=..)"
        )


def _shard_padded(
    x: Any, mesh: Mesh, spec: Any, sizes: Any, copy: bool | None, name: str | None
) -> Any:
    """Lay out with padding; every leaf is checked before one is placed."""
    from .domain.packing import pack
    from .domain.sizes import plan_splits

    if isinstance(x, np.ndarray | jax.Array) and framework_of(x) is None:
        return pack(x, mesh, spec, sizes, copy=copy, name=name or "array")
    framework = framework_of(x)
    if framework is not None:
        return framework.shard_padded(x, mesh, spec, sizes, copy=copy, name=name)
    leaves, structure = named_arrays(x, name)
    theirs = [leaf.name for leaf in leaves if leaf.framework is not None]
    if theirs or sizes is not None:
        fault = f"{', '.join(theirs)} belong to a framework" if theirs else "x is a tree of arrays"
        raise ShardingError(
            f"uneven='pad' is of trees of NumPy and JAX arrays, and sizes= of one array: {fault}. "
            "Shard the arrays and tensors one by one."
        )
    assign(leaves, structure, mesh, spec, name)
    faults = []
    for leaf in leaves:
        try:
            sharding = named_sharding(leaf.spec, mesh, leaf.value.ndim, name=leaf.name)
            if copy is False and any(plan_splits(leaf.value.shape, sharding, None)):
                raise no_sharing(leaf.name, "blocks of other sizes are padded")
        except ShardingError as error:
            faults.append(error)
    raise_collected(faults)
    laid = [pack(leaf.value, mesh, leaf.spec, copy=copy, name=leaf.name) for leaf in leaves]
    return jax.tree.unflatten(structure, laid)


def _reshard_uneven(u: UnevenArray, spec: Any, mesh: Mesh | None) -> Any:
    """Blocks where they are wanted, of the sizes they have where there are as many."""
    from .domain.packing import reshard_uneven

    return reshard_uneven(u, spec, mesh)


def _map_arrays(function: Callable[[jax.Array], Any], x: Any, verb: str) -> Any:
    """Apply to every array of a tree, after a look at all of them."""
    wrong = []
    for path, leaf in jax.tree.leaves_with_path(x, is_leaf=is_uneven):
        if is_uneven(leaf):
            continue
        if not isinstance(leaf, jax.Array) and framework_of(leaf) is None:
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
        return function(leaf) if isinstance(leaf, jax.Array) else verbs[verb](leaf)

    return jax.tree.map(one, x, is_leaf=is_uneven)


def _gather(x: Any) -> jax.Array:
    if is_uneven(x):
        from .domain.packing import gather

        return gather(x, _sharding_of(x.array))
    if not isinstance(x, Tracer) and x.is_fully_replicated:
        return x
    whole = NamedSharding(_sharding_of(x).mesh, P())
    metrics.count("gathers")
    return lay_out(x, whole)


def _sharding_of(x: jax.Array) -> NamedSharding:
    if isinstance(x, Tracer):
        told = jax.typeof(x).sharding
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
    raise ShardingError(
        f"an array of shape {x.shape} lies on several devices by a {type(x.sharding).__name__}, "
        "which has no mesh; lay it out with iso.reshard(x, spec, mesh)"
    )
