"""The leaves of a model: names, shapes, dtypes, and axis names from their metadata.

>>> leaves_of({"w": (8, 4)})
[ModelLeaf(name='w', shape=(8, 4), dtype=None, names=None, itemsize=4)]
>>> leaves_of([jax.ShapeDtypeStruct((8,), "float32")])[0].size
32
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.leaf_paths import path_name

from ..frameworks import framework_of
from .freezing import frozen
from .layout_rules import PlanError

_BYTES_IF_UNKNOWN = 4
_NAMES_OF_NNX = ("out_sharding", "sharding_names", "sharding")


class ModelLeaf(NamedTuple):
    """One array of a model.

    Attributes:
        name: its path, joined by dots.
        shape: global shape.
        dtype: name of its dtype, the same for every framework; None if only the shape is known.
        names: the axis names in the leaf's metadata, or None.
        itemsize: bytes of an element; 4 if the dtype is unknown.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    names: tuple[Any, ...] | None = None
    itemsize: int = _BYTES_IF_UNKNOWN

    @property
    def size(self) -> int:
        """Bytes of the unsharded leaf."""
        return math.prod(self.shape) * self.itemsize


def leaves_of(tree: Any) -> list[ModelLeaf]:
    """List the leaves of a model.

    Args:
        tree: a mapping from names to shapes; a module of a framework with a bridge; or a pytree
            whose leaves have a shape. Numbers count as rank 0.

    Raises:
        PlanError: naming each leaf that is neither an array nor a number.
    """
    if isinstance(tree, Mapping) and all(map(_is_shape, tree.values())):
        return [ModelLeaf(name, tuple(shape)) for name, shape in tree.items()]
    named = _named(tree)
    wrong = [
        f"  {n}: {type(x).__name__}"
        for n, x in named
        if not hasattr(x, "shape") and _is_unsupported(x)
    ]
    if wrong:
        raise PlanError("\n".join(["a plan shards arrays and numbers, not:", *wrong]))
    return [_leaf(name, _array(x), names_of(x)) for name, x in named]


def boxed_leaves(tree: Any) -> list[tuple[str, Any]]:
    """List the leaves of a pytree by name; one with axis names in its metadata remains boxed.

    Returns:
        Pairs of name and array, or box or variable of Flax; what `Plan.resolve` takes as a mapping.

    Example:
        >>> boxed_leaves({"a": [1.0]})
        [('a.0', 1.0)]
    """
    with_paths = jax.tree.leaves_with_path(tree, is_leaf=lambda x: names_of(x) is not None)
    return [(path_name(path), leaf) for path, leaf in with_paths]


def modules_of(tree: Any) -> list[str] | None:
    """List the names of a model's modules; None if it is not a module."""
    framework = None if hasattr(tree, "shape") else framework_of(tree)
    return None if framework is None else framework.named_modules(tree)


def names_in(tree: Any) -> list[str] | None:
    """The names that a plan's patterns are matched with, of all arrays and modules of a tree.

    Args:
        tree: as `isoshard.shard` takes it.

    Returns:
        The names; none for a single array, which need not have one. None if something has no
        known names, such as an optimizer.

    Example:
        >>> names_in({"a": [jax.numpy.ones(2), 1.0]}), names_in(jax.numpy.ones(2))
        (['a.0'], [])
    """
    names: list[str] = []
    is_framework_object = not hasattr(tree, "shape") and framework_of(tree) is not None
    for name, leaf in [("", tree)] if is_framework_object else boxed_leaves(tree):
        framework = None if hasattr(leaf, "shape") else framework_of(leaf)
        if framework is not None:
            try:
                names += framework.named_arrays(leaf)
            except TypeError:
                return None
        elif leaf is not tree and hasattr(_array(leaf), "shape"):
            names.append(name)
    return names


def names_of(leaf: Any) -> tuple[Any, ...] | None:
    """Read the axis names that a leaf carries: Flax boxes and variables do.

    Linen's `Partitioned` and `LogicallyPartitioned` have them as `names`; a variable of NNX in its
    metadata, as `out_sharding` (`sharding_names` and `sharding` in older versions). Flax itself is
    not needed, and rules in the metadata alongside the names are ignored: the plan's apply.

    Returns:
        One entry per axis, logical names or mesh axes; None if there are no names.

    Example:
        >>> names_of(1.0) is None
        True
    """
    metadata = getattr(type(leaf), "get_metadata", None)
    if metadata is not None:
        values = metadata(leaf)
        names = next((values[key] for key in _NAMES_OF_NNX if values.get(key)), None)
    elif hasattr(type(leaf), "unbox"):
        names = getattr(leaf, "names", None)
    else:
        return None
    names = getattr(names, "spec", names)  # a NamedSharding
    return tuple(map(frozen, names)) if isinstance(names, P | tuple | list) else None


def _leaf(name: str, array: Any, names: tuple[Any, ...] | None) -> ModelLeaf:
    shape, dtype = tuple(getattr(array, "shape", ())), getattr(array, "dtype", None)
    if dtype is None:
        return ModelLeaf(name, shape, None, names)
    size = getattr(dtype, "itemsize", _BYTES_IF_UNKNOWN)
    return ModelLeaf(name, shape, str(dtype).removeprefix("torch."), names, size)


def _named(tree: Any) -> list[tuple[str, Any]]:
    framework = None if hasattr(tree, "shape") else framework_of(tree)
    if framework is not None:
        return list(framework.named_arrays(tree).items())
    return boxed_leaves(tree)


def _array(leaf: Any) -> Any:
    """The array in a box of Linen; anything else is returned as it is."""
    return leaf if hasattr(leaf, "shape") else getattr(leaf, "value", leaf)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(size, int) for size in value)


def _is_unsupported(leaf: Any) -> bool:
    return names_of(leaf) is None and not isinstance(leaf, int | float | complex)
