"""Leaves of a tree on their way to devices: what each is called, and the spec it is to have.

>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> leaves, structure = named_arrays({"a": np.ones(2), "b": [np.ones(4)]}, "params")
>>> assign(leaves, structure, mesh, {"a": None, "b": P("y")}, "params")
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
from .host_memory import take_host
from .relayout import lay_out
from .remembered_moves import move_of


@dataclasses.dataclass
class NamedArray:
    """One leaf on its way.

    Attributes:
        path: its path in the tree, joined by dots.
        name: the same behind the name of the tree, for messages.
        value: the array or module, a struct (`jax.ShapeDtypeStruct`), or what stays what it is.
        framework: whose it is; None for NumPy and JAX arrays, structs and what is no array.
        spec: what it is to have.
        whole: the global shape, if `value` is only what this process has of it.
    """

    path: str
    name: str
    value: Any
    framework: Framework | None
    spec: Any = None
    whole: tuple[int, ...] | None = None

    @property
    def stays(self) -> bool:
        """Whether it is no array, and stays what it is."""
        return self.framework is None and not is_array(self.value)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The global shape, or None: a module has none, and neither has what is no array."""
        own = getattr(self.value, "shape", None)
        return self.whole if own is None or self.whole is not None else tuple(own)

    @property
    def dtype(self) -> Any:
        """The dtype of an array."""
        return getattr(self.value, "dtype", None)

    def check(self, mesh: Mesh, copy: bool | None) -> ShardingError | None:
        """Look whether the leaf can be placed; the fault, or None."""
        if self.stays:
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

    def place(self, mesh: Mesh, copy: bool | None) -> Any:
        """Lay the leaf out; what is no array comes back as it is."""
        if self.framework is not None:
            return self.framework.shard(self.value, mesh, self.spec, copy=copy, name=self.name)
        if self.stays:
            return self.value
        value, sharding = self.value, self._sharding(mesh)
        if isinstance(value, jax.ShapeDtypeStruct):
            return value.update(sharding=sharding)
        if isinstance(value, Tracer) or manual_axes():
            return lay_out(value, sharding, copy=copy, name=self.name)
        mesh = as_mesh(mesh)
        if isinstance(value, np.ndarray):
            return take_host(value, sharding, copy=copy, name=self.name)
        if copy is None:
            sharding = move_of(value, mesh, self.spec, sharding)
        return lay_out(value, sharding, copy=copy, name=self.name)

    def _sharding(self, mesh: Mesh) -> NamedSharding:
        shape = self.value.shape
        return named_sharding(self.spec, mesh, len(shape), shape=shape, name=self.name, sums=True)


def named_arrays(x: Any, name: str | None) -> tuple[list[NamedArray], Any]:
    """Name every leaf of a tree.

    Returns:
        The leaves, and the structure to put results back into. Leaves that are no arrays are among
        them, and stay what they are.

    Raises:
        TypeError: `x` is a single leaf that is no array, or a leaf hides arrays.
    """
    with_paths, structure = jax.tree.flatten_with_path(x)
    leaves = []
    wrong = []
    for path, value in with_paths:
        path = path_name(path)
        called = ".".join(part for part in (name, path) if part) or "array"
        value = np.asarray(value) if isinstance(value, np.generic) else value
        framework = framework_of(value)
        if framework is None and not is_array(value):
            hidden = f"is a {type(value).__name__}" if value is x else hidden_array(value)
            wrong += [f"{called} {hidden}"] if hidden else []
        leaves.append(NamedArray(path or called, called, value, framework))
    if wrong:
        raise TypeError(f"only arrays can be laid out: {'; '.join(wrong)}. {_way_out(x)}")
    return leaves, structure


def _way_out(x: Any) -> str:
    """How what is no array becomes one."""
    if isinstance(x, str | os.PathLike):
        return "Read the file first: iso.load_safetensors, iso.restore or np.load."
    if hasattr(x, "init") and hasattr(x, "apply"):
        return "It holds no arrays; lay out what its init returns: iso.shard(x.init(key, ..), ..)."
    return "Make it an array with np.asarray, or register its class with jax.tree_util."


def assign(
    leaves: list[NamedArray], structure: Any, mesh: Mesh, spec: Any, name: str | None
) -> None:
    """Give each leaf its spec.

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
        _ask_plan(leaves, structure, mesh, spec)
        return
    specs = [spec] * len(leaves) if is_spec(spec) else _spread(spec, leaves, structure, name)
    for leaf, own in zip(leaves, specs, strict=True):
        leaf.spec = own


def _ask_plan(leaves: list[NamedArray], structure: Any, mesh: Mesh, plan: Plan) -> None:
    """Look arrays up by their path; modules get the whole plan, as their parameters have names."""
    arrays = {leaf.path: leaf for leaf in leaves if leaf.shape is not None and not leaf.stays}
    paths = Counter(leaf.path for leaf in leaves if not leaf.stays)
    twice = [path for path, count in paths.items() if count > 1]
    if twice:
        raise SpecError(
            f"several leaves are called {', '.join(twice)}, and a Plan goes by names; rename keys "
            "so that paths joined by dots differ, or give a tree of specs"
        )
    boxed = dict(boxed_leaves(structure.unflatten(leaves)))  # boxes of Linen name their axes
    named = {path: boxed.get(path, leaf) for path, leaf in arrays.items()}
    resolved = plan.resolve(named, mesh)
    warn_replicated(plan, resolved)
    layouts = resolved.shardings
    specs = {path: s if is_offloaded(s) else s.spec for path, s in layouts.items()}
    for leaf in leaves:
        leaf.spec = specs.get(leaf.path, plan)


def _spread(specs: Any, leaves: list[NamedArray], structure: Any, name: str | None) -> list[Any]:
    """One spec per leaf, from a tree of specs that may stop early; what stays needs none."""
    given = [
        (path_name(path), spec)
        for path, spec in jax.tree.leaves_with_path(specs, is_leaf=is_spec)
        if not _is_empty(spec)
    ]
    paths = [path_name(path) for path, _ in _paths_of(structure)]
    found = [[spec for start, spec in given if _under(path, start)] for path in paths]
    wrong = [
        f"no spec for {path or 'the array'}"
        for path, specs, leaf in zip(paths, found, leaves, strict=True)
        if not specs and not leaf.stays
    ]
    stay = {path: leaf for path, leaf in zip(paths, leaves, strict=True) if leaf.stays}
    wrong += [
        f"{path} is a {type(stay[path].value).__name__}, no array, and is given {spec}"
        for path, spec in given
        if path in stay and _splits(spec)
    ]
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
            f"are {', '.join(filter(None, paths)) or 'none'}; give one spec each, or a Plan of "
            "name patterns."
        )
    return [specs[0] if specs else None for specs in found]


def _splits(spec: Any) -> bool:
    """Whether a spec names an axis."""
    spec = spec.spec if isinstance(spec, NamedSharding) else spec
    entries = entries_of(spec) if isinstance(spec, P) else spec
    return isinstance(entries, tuple | list) and any(entry is not None for entry in entries)


def _paths_of(structure: Any) -> list[tuple[Any, Any]]:
    return jax.tree.leaves_with_path(jax.tree.unflatten(structure, range(structure.num_leaves)))


def _under(path: str, start: str) -> bool:
    return not start or path == start or path.startswith(start + ".")


def _is_empty(spec: Any) -> bool:
    return isinstance(spec, dict | list) and not spec
