"""Leaves of a tree with their names and target specs, before they are put on devices.

>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> leaves, structure = named_arrays({"a": np.ones(2), "b": [np.ones(4)]}, "params")
>>> set_specs(leaves, structure, mesh, {"a": None, "b": P("y")}, "params")
>>> [(leaf.name, leaf.spec) for leaf in leaves]
[('params.a', None), ('params.b.0', P('y',))]
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError, SpecError
from isoshard.core.frameworks import Framework, framework_of
from isoshard.core.layout.in_shard_map import manual_axes
from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.layout.mesh import as_mesh
from isoshard.core.layout.offload import is_offloaded
from isoshard.core.layout.spec import is_spec, named_sharding
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.plan import Plan
from isoshard.core.plan.model_leaves import boxed_leaves
from isoshard.core.plan.replication_warning import warn_replicated
from isoshard.core.runtime._jax_internals.tracers import Tracer

from .array_like import hidden_array, is_array
from .exchange import check_shareable
from .host_memory import narrowed_to_jax
from .reshard import reshard_array
from .reshard_cache import resharding


@dataclasses.dataclass
class NamedArray:
    """One leaf of a tree, its name and its target spec.

    Attributes:
        path: its path in the tree, joined by dots.
        name: the path after the name of the tree, for messages.
        value: the array or module, a struct (`jax.ShapeDtypeStruct`), or a leaf that is no array.
        framework: of the value; None for NumPy and JAX arrays, structs and other leaves.
        spec: the target spec.
        global_shape: the global shape, if `value` is this process's local data.
    """

    path: str
    name: str
    value: Any
    framework: Framework | None
    spec: Any = None
    global_shape: tuple[int, ...] | None = None

    @property
    def is_passthrough(self) -> bool:
        """Whether it is no array, and is returned unchanged."""
        return self.framework is None and not is_array(self.value)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The global shape; None for a module, and for a leaf that is no array."""
        local_shape = getattr(self.value, "shape", None)
        return (
            self.global_shape
            if local_shape is None or self.global_shape is not None
            else tuple(local_shape)
        )

    @property
    def dtype(self) -> Any:
        """The dtype of an array."""
        return getattr(self.value, "dtype", None)

    def check(self, mesh: Mesh, copy: bool | None) -> ShardingError | None:
        """The error that putting the leaf on devices would raise, or None."""
        if self.is_passthrough:
            return None
        try:
            if not isinstance(self.value, Tracer | jax.ShapeDtypeStruct):
                as_mesh(mesh)  # with devices
            if self.framework is not None:
                self.framework.check_shard(self.value, mesh, self.spec, copy=copy, name=self.name)
            elif isinstance(self.value, jax.ShapeDtypeStruct):
                self._sharding(mesh)
            else:
                check_shareable(self.value, self._sharding(mesh), copy=copy, name=self.name)
        except ShardingError as error:
            return error
        return None

    def put(self, mesh: Mesh, copy: bool | None) -> Any:
        """Put the leaf on devices; one that is no array is returned unchanged."""
        if self.framework is not None:
            return self.framework.shard(self.value, mesh, self.spec, copy=copy, name=self.name)
        if self.is_passthrough:
            return self.value
        value, sharding = self.value, self._sharding(mesh)
        if isinstance(value, jax.ShapeDtypeStruct):
            return value.update(sharding=sharding)
        if isinstance(value, Tracer) or manual_axes():
            return reshard_array(value, sharding, copy=copy, name=self.name)
        mesh = as_mesh(mesh)
        if isinstance(value, np.ndarray):
            return narrowed_to_jax(value, sharding, copy=copy, name=self.name)
        if copy is None:
            sharding = resharding(value, mesh, self.spec, sharding)
        return reshard_array(value, sharding, copy=copy, name=self.name)

    def _sharding(self, mesh: Mesh) -> NamedSharding:
        shape = self.value.shape
        return named_sharding(self.spec, mesh, len(shape), shape=shape, name=self.name, sums=True)


def named_arrays(x: Any, name: str | None) -> tuple[list[NamedArray], Any]:
    """Name every leaf of a tree.

    Returns:
        The leaves, including those that are no arrays, and the structure of the tree.

    Raises:
        TypeError: `x` is a single leaf that is no array, or a leaf hides arrays.
    """
    with_paths, structure = jax.tree.flatten_with_path(x)
    leaves = []
    wrong = []
    for path, value in with_paths:
        path = path_name(path)
        label = ".".join(component for component in (name, path) if component) or "array"
        value = np.asarray(value) if isinstance(value, np.generic) else value
        framework = framework_of(value)
        if framework is None and not is_array(value):
            hidden = f"is a {type(value).__name__}" if value is x else hidden_array(value)
            wrong += [f"{label} {hidden}"] if hidden else []
        leaves.append(NamedArray(path or label, label, value, framework))
    if wrong:
        raise TypeError(f"only arrays can be sharded: {'; '.join(wrong)}. {_fix(x)}")
    return leaves, structure


def _fix(x: Any) -> str:
    """How to fix a leaf that is no array."""
    if isinstance(x, str | os.PathLike):
        return "Read the file first: iso.load_safetensors, iso.restore or np.load."
    if hasattr(x, "init") and hasattr(x, "apply"):
        return "It has no arrays; shard what its init returns: iso.shard(x.init(key, ..), ..)."
    return "Make it an array with np.asarray, or register its class with jax.tree_util."


def set_specs(
    leaves: list[NamedArray], structure: Any, mesh: Mesh, spec: Any, name: str | None
) -> None:
    """Set each leaf's spec.

    Args:
        leaves: as `named_arrays` gives them.
        structure: of their tree.
        mesh: the mesh.
        spec: one for all, a tree of specs that may stop early, or a Plan.
        name: of the tree, for messages.

    Raises:
        SpecError: the tree of specs does not match, or the plan does not fit.
    """
    if isinstance(spec, Plan):
        _assign_by_plan(leaves, structure, mesh, spec)
        return
    specs = [spec] * len(leaves) if is_spec(spec) else _broadcast(spec, leaves, structure, name)
    for leaf, leaf_spec in zip(leaves, specs, strict=True):
        leaf.spec = leaf_spec


def _assign_by_plan(leaves: list[NamedArray], structure: Any, mesh: Mesh, plan: Plan) -> None:
    """Look arrays up by their path; modules get the plan itself, as their parameters have names."""
    arrays = {
        leaf.path: leaf for leaf in leaves if leaf.shape is not None and not leaf.is_passthrough
    }
    paths = Counter(leaf.path for leaf in leaves if not leaf.is_passthrough)
    repeated = [path for path, count in paths.items() if count > 1]
    if repeated:
        raise SpecError(
            f"several leaves are called {', '.join(repeated)}, and a Plan goes by names; rename "
            "keys so that paths joined by dots differ, or give a tree of specs"
        )
    boxed = dict(boxed_leaves(structure.unflatten(leaves)))  # boxes of Linen name their axes
    named = {path: boxed.get(path, leaf) for path, leaf in arrays.items()}
    resolved = plan.resolve(named, mesh)
    warn_replicated(plan, resolved)
    layouts = resolved.shardings
    specs = {path: s if is_offloaded(s) else s.spec for path, s in layouts.items()}
    for leaf in leaves:
        leaf.spec = specs.get(leaf.path, plan)


def _broadcast(specs: Any, leaves: list[NamedArray], structure: Any, name: str | None) -> list[Any]:
    """One spec per array leaf, from a tree of specs that may be a prefix."""
    spec_by_path = [
        (path_name(path), spec)
        for path, spec in jax.tree.leaves_with_path(specs, is_leaf=is_spec)
        if not _is_empty(spec)
    ]
    paths = [path_name(path) for path, _ in _paths_of(structure)]
    matches = [[spec for start, spec in spec_by_path if _is_below(path, start)] for path in paths]
    wrong = [
        f"no spec for {path or 'the array'}"
        for path, specs, leaf in zip(paths, matches, leaves, strict=True)
        if not specs and not leaf.is_passthrough
    ]
    passthrough = {
        path: leaf for path, leaf in zip(paths, leaves, strict=True) if leaf.is_passthrough
    }
    wrong += [
        f"{path} is a {type(passthrough[path].value).__name__}, no array, and has spec {spec}"
        for path, spec in spec_by_path
        if path in passthrough and _splits(spec)
    ]
    wrong += [
        f"{start or 'the tree'} is a {type(spec).__name__}, not a spec"
        for start, spec in spec_by_path
        if not is_spec(spec)
    ]
    wrong += [
        f"{start} has a spec, and there is no such leaf"
        for start, spec in spec_by_path
        if spec is not None and not any(_is_below(path, start) for path in paths)
    ]
    if wrong:
        raise SpecError(
            f"{name or 'tree'}: the tree of specs does not match: {'; '.join(wrong)}. The leaves "
            f"are {', '.join(filter(None, paths)) or 'none'}; give one spec each, or a Plan of "
            "name patterns."
        )
    return [specs[0] if specs else None for specs in matches]


def _splits(spec: Any) -> bool:
    """Whether a spec splits any axis."""
    spec = spec.spec if isinstance(spec, NamedSharding) else spec
    entries = entries_of(spec) if isinstance(spec, P) else spec
    return isinstance(entries, tuple | list) and any(entry is not None for entry in entries)


def _paths_of(structure: Any) -> list[tuple[Any, Any]]:
    return jax.tree.leaves_with_path(jax.tree.unflatten(structure, range(structure.num_leaves)))


def _is_below(path: str, start: str) -> bool:
    return not start or path == start or path.startswith(start + ".")


def _is_empty(spec: Any) -> bool:
    return isinstance(spec, dict | list) and not spec
