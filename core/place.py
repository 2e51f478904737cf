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

Objects of a framework with a bridge (torch tensors and modules, Flax modules) are handed to it.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from . import metrics
from .errors import ShardingError, SpecError, raise_collected
from .exchange import check_shareable, host_to_jax, lay_out
from .frameworks import Framework, framework_of
from .mesh import as_mesh, mesh_of
from .plan import Plan
from .resolved import path_name
from .spec import is_spec, named_sharding


def shard(
    x: Any, mesh: Mesh, spec: Any, *, copy: bool | None = None, name: str | None = None
) -> Any:
    """Lay `x` out over a mesh.

    Args:
        x: a NumPy or JAX array, a pytree of arrays, or an object of a framework with a bridge.
        mesh: the mesh, or what `as_mesh` takes.
        spec: any spelling of a spec, a tree of them for a tree, or a Plan. In a tree of specs,
            write leaves as P(..): a tuple of names, indices and None is one spec for all.
        copy: None may share memory with `x` or copy (a later write to a NumPy array then shows),
            False shares or raises, True copies.
        name: of `x`, for messages; a tree's leaves are called `name.path`.

    Returns:
        The same kind of object: NumPy and JAX arrays give a jax.Array, trees a tree of the same
        structure, frameworks their own. In a JAX transformation a value is constrained.

    Raises:
        ShardingError: a spec does not fit its leaf (SpecError, UnevenError), or memory cannot be
            shared (CopyError). Nothing has been changed then.
        TypeError: a leaf is no array.
    """
    mesh = as_mesh(mesh)
    framework = framework_of(x)
    if framework is not None:
        return framework.shard(x, mesh, spec, copy=copy, name=name)
    if isinstance(x, np.ndarray | jax.Array) and is_spec(spec):
        return _Leaf("", name or "array", x, None, spec).place(mesh, copy)
    leaves, structure = _leaves(x, name)
    _assign(leaves, structure, mesh, spec, name)
    faults = [leaf.check(mesh, copy) for leaf in leaves]
    raise_collected([fault for fault in faults if fault is not None])
    return jax.tree.unflatten(structure, [leaf.place(mesh, copy) for leaf in leaves])


def reshard(x: Any, spec: Any, mesh: Mesh | None = None) -> Any:
    """Change the layout of `x`; data moves between devices as needed.

    Args:
        x: as for `shard`, laid out already unless `mesh` is given.
        spec: as for `shard`. A NamedSharding brings its mesh along.
        mesh: the new mesh; by default the one `x` is on.

    Returns:
        The same kind of object; what is where it belongs is shared with `x`.

    Raises:
        ShardingError: a spec does not fit, or there is no mesh to stay on.
        TypeError: a leaf is no array.
    """
    if mesh is None and isinstance(spec, NamedSharding):
        mesh = mesh_of(spec)
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
        device, is returned as it is.

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
        ShardingError: the array is traced, or lies on several devices without a mesh.
        TypeError: a leaf is no jax.Array; a NumPy array has no layout.

    Example:
        >>> sharding_of(jax.numpy.ones(3)).mesh.axis_names
        ('device',)
    """
    framework = framework_of(x)
    if framework is not None:
        return framework.sharding_of(x)
    return _map_arrays(_sharding_of, x, "sharding_of")


@dataclasses.dataclass
class _Leaf:
    """One leaf on its way: what it is, what it is called, and the spec it is to have."""

    path: str
    name: str
    value: Any
    framework: Framework | None
    spec: Any = None

    def check(self, mesh: Mesh, copy: bool | None) -> ShardingError | None:
        """Look whether the leaf can be placed, and how."""
        try:
            if self.framework is not None:
                self.framework.check_shard(self.value, mesh, self.spec, copy=copy, name=self.name)
            else:
                check_shareable(self.value, self._sharding(mesh), copy=copy, name=self.name)
        except ShardingError as error:
            return error
        return None

    def place(self, mesh: Mesh, copy: bool | None) -> Any:
        if self.framework is not None:
            return self.framework.shard(self.value, mesh, self.spec, copy=copy, name=self.name)
        move: Callable[..., jax.Array]
        move = host_to_jax if isinstance(self.value, np.ndarray) else lay_out
        return move(self.value, self._sharding(mesh), copy=copy, name=self.name)

    def _sharding(self, mesh: Mesh) -> NamedSharding:
        shape = self.value.shape
        return named_sharding(self.spec, mesh, len(shape), shape=shape, name=self.name)


def _leaves(x: Any, name: str | None) -> tuple[list[_Leaf], Any]:
    """Name every leaf, and refuse those that are no arrays."""
    with_paths, structure = jax.tree.flatten_with_path(x)
    leaves = []
    wrong = []
    for path, value in with_paths:
        path = path_name(path)
        called = ".".join(part for part in (name, path) if part) or "array"
        value = np.asarray(value) if isinstance(value, np.generic) else value
        framework = framework_of(value)
        if framework is None and not isinstance(value, np.ndarray | jax.Array):
            wrong.append(f"{called} is {type(value).__name__}")
        leaves.append(_Leaf(path or called, called, value, framework))
    if wrong:
        raise TypeError(
            f"only arrays can be laid out: {'; '.join(wrong)}. Wrap numbers with np.asarray, take "
            "other leaves out, or register their class with jax.tree_util."
        )
    return leaves, structure


def _assign(leaves: list[_Leaf], structure: Any, mesh: Mesh, spec: Any, name: str | None) -> None:
    """Give each leaf its spec."""
    if isinstance(spec, Plan):
        _ask_plan(leaves, mesh, spec)
        return
    specs = [spec] * len(leaves) if is_spec(spec) else _spread(spec, structure, name)
    for leaf, own in zip(leaves, specs, strict=True):
        leaf.spec = own


def _ask_plan(leaves: list[_Leaf], mesh: Mesh, plan: Plan) -> None:
    """Look arrays up by their path; modules get the whole plan, as their parameters have names."""
    arrays = {leaf.path: leaf.value for leaf in leaves if hasattr(leaf.value, "shape")}
    if len({leaf.path for leaf in leaves}) < len(leaves):
        twice = [path for path, count in Counter(leaf.path for leaf in leaves).items() if count > 1]
        raise SpecError(
            f"several leaves are called {', '.join(twice)}, and a Plan goes by names; rename keys "
            "so that paths joined by dots differ, or give a tree of specs"
        )
    specs = plan.resolve(arrays, mesh).specs
    for leaf in leaves:
        leaf.spec = specs.get(leaf.path, plan)


def _spread(specs: Any, structure: Any, name: str | None) -> list[Any]:
    """One spec per leaf, from a tree of specs that may stop early."""
    given = [
        (path_name(path), spec)
        for path, spec in jax.tree.leaves_with_path(specs, is_leaf=is_spec)
        if not _is_empty(spec)
    ]
    paths = [path_name(path) for path, _ in _paths_of(structure)]
    found = [[spec for start, spec in given if _under(path, start)] for path in paths]
    wrong = [f"no spec for {path}" for path, specs in zip(paths, found, strict=True) if not specs]
    wrong += [
        f"{start or 'the tree'} is a {type(spec).__name__}, not a spec"
        for start, spec in given
        if not is_spec(spec)
    ]
    wrong += [
        f"{start} is given a spec, and there is no such leaf"
        for start, spec in given
        if spec is not None and not any(_under(path, start) for path in paths)
    ]
    if wrong:
        raise SpecError(
            f"{name or 'tree'}: the tree of specs does not match: {'; '.join(wrong)}. The leaves "
            f"are {', '.join(paths) or 'none'}; give one spec each, or a Plan of name patterns."
        )
    return [specs[0] for specs in found]


def _paths_of(structure: Any) -> list[tuple[Any, Any]]:
    return jax.tree.leaves_with_path(jax.tree.unflatten(structure, range(structure.num_leaves)))


def _under(path: str, start: str) -> bool:
    return not start or path == start or path.startswith(start + ".")


def _is_empty(spec: Any) -> bool:
    return isinstance(spec, dict | list) and not spec


def _mesh_of(x: Any) -> Mesh:
    meshes = {
        mesh_of(leaf.sharding): None
        for leaf in jax.tree.leaves(x)
        if isinstance(leaf, jax.Array)
        and not isinstance(leaf, Tracer)
        and isinstance(leaf.sharding, NamedSharding)
    }
    if len(meshes) != 1:
        count = "no mesh" if not meshes else f"{len(meshes)} different meshes"
        raise ShardingError(
            f"the arrays lie on {count}; say which one to lay them out on: "
            "iso.reshard(x, spec, mesh)"
        )
    return next(iter(meshes))


def _map_arrays(function: Callable[[jax.Array], Any], x: Any, verb: str) -> Any:
    """Apply to every array of a tree, after a look at all of them."""
    wrong = []
    for path, leaf in jax.tree.leaves_with_path(x):
        if not isinstance(leaf, jax.Array) and framework_of(leaf) is None:
            wrong.append(f"{path_name(path) or 'the argument'} is {type(leaf).__name__}")
    if wrong:
        raise TypeError(
            f"{verb} takes arrays that lie on devices: {'; '.join(wrong)}. Lay it out first: "
            "iso.shard(x, mesh, spec)."
        )
    verbs = {"full": full, "sharding_of": sharding_of}

    def one(leaf: Any) -> Any:
        return function(leaf) if isinstance(leaf, jax.Array) else verbs[verb](leaf)

    return jax.tree.map(one, x)


def _gather(x: jax.Array) -> jax.Array:
    if not isinstance(x, Tracer) and x.is_fully_replicated:
        return x
    whole = NamedSharding(_sharding_of(x).mesh, P())
    metrics.count("gathers")
    return jax.device_put(x, whole)


def _sharding_of(x: jax.Array) -> NamedSharding:
    if isinstance(x, Tracer):
        raise ShardingError(
            "a traced value has no layout yet, the compiler chooses it; constrain it with "
            "iso.shard(x, mesh, spec), or ask outside jit"
        )
    if isinstance(x.sharding, NamedSharding):
        return x.sharding
    if isinstance(x.sharding, SingleDeviceSharding):
        return NamedSharding(Mesh(np.array(list(x.sharding.device_set)), ("device",)), P())
    raise ShardingError(
        f"an array of shape {x.shape} lies on several devices by a {type(x.sharding).__name__}, "
        "which has no mesh; lay it out with iso.reshard(x, spec, mesh)"
    )
