"""The leaves of a tree of either framework, or both, by name.

>>> groups, _ = named_groups({"params": {"w": np.zeros(2)}, "epoch": 3})
>>> [(name, part.value) for group in groups for name, part in group.named()][0]
('epoch', 3)

Arrays, numbers and strings are leaves. A module or optimizer is also a leaf of the tree, and has
parts, whose names follow that of the leaf, as in `model.blocks.0.weight`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from isoshard.core.checkpoint.source import Entry, NamedState
from isoshard.core.frameworks import Framework, framework_of
from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime._jax_internals.tracers import Tracer

T = TypeVar("T")

VALUES = (bool, int, float, complex, str, bytes)
_SEQUENCES = (list, tuple)


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """A leaf of the tree with its parts.

    Attributes:
        name: its path, joined by dots.
        value: the leaf.
        framework: of the leaf; None for JAX, NumPy and Python.
        parts: by the name after `name`; an array has one, named "".
        stateful: whether it is a module, an optimizer, .. rather than an array or number.
    """

    name: str
    value: Any
    framework: Framework | None
    parts: dict[str, NamedState]
    stateful: bool

    def full_name(self, inner: str) -> str:
        """The full name of a part."""
        return ".".join(word for word in (self.name, inner) if word)

    def named(self) -> Iterator[tuple[str, NamedState]]:
        """The parts with their full names."""
        return ((self.full_name(inner), part) for inner, part in self.parts.items())


def named_groups(tree: Any, saved: Mapping[str, Entry] | None = None) -> tuple[list[Group], Any]:
    """Name every leaf of a tree.

    Args:
        tree: dictionaries, lists, pytrees of any kind, with modules and optimizers as leaves.
        saved: a checkpoint's entries: optimizers then have the parts of their first step, too.

    Returns:
        The leaves in JAX's order, and the structure to put results back into.

    Raises:
        ValueError: two leaves have one name, or the keys of a dictionary cannot be ordered.
        TypeError: something is neither an array, a module or optimizer, nor a number or string.
    """
    try:
        leaves, structure = jax.tree.flatten_with_path(tree, is_leaf=_is_leaf)
    except ValueError as error:
        raise ValueError(
            "JAX orders a tree by its keys, so the keys of a dictionary must be of one kind: "
            f"{error.__cause__ or error}"
        ) from error
    groups = [_group(path_name(path), value, saved) for path, value in leaves]
    names = [(name, part) for group in groups for name, part in group.named()]
    wrong = [
        f"\n  {name or 'the tree'}: {why}" for name, part in names if (why := _unsupported(part))
    ]
    if wrong:
        raise TypeError(
            "a checkpoint has arrays of any framework, modules, optimizers, numbers and strings, "
            f"and not:{''.join(wrong)}\nOf an object with a state of its own give that: "
            "obj.state_dict()."
        )
    twice = [name for name, count in Counter(name for name, _ in names).items() if count > 1]
    if twice:
        raise ValueError(
            f"several leaves are called {', '.join(map(repr, twice))}: their paths are the same "
            "once joined by dots; rename a key"
        )
    return groups, structure


def _is_leaf(node: Any) -> bool:
    return isinstance(node, UnevenArray) or framework_of(node) is not None


def _group(name: str, value: Any, saved: Mapping[str, Entry] | None) -> Group:
    framework = framework_of(value)
    parts = None
    if framework is not None:
        parts = framework.parts(value, None if saved is None else below(saved, name))
    return Group(name, value, framework, parts or {"": NamedState(value)}, parts is not None)


def below(leaves: Mapping[str, T], name: str) -> dict[str, T]:
    """The leaves below a name, without it; all leaves below ""."""
    start = f"{name}." if name else ""
    return {key[len(start) :]: leaf for key, leaf in leaves.items() if key.startswith(start)}


def _unsupported(part: NamedState) -> str:
    """Why a state cannot be in a checkpoint; empty if it can."""
    value = part.value
    if isinstance(value, UnevenArray):
        return _unsupported_blocks(value)
    if isinstance(value, Tracer):
        return "a traced value; save outside jit"
    if isinstance(value, jax.Array) and value.is_deleted():
        return "a jax.Array that was donated; save what the step returned"
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return f"a NumPy array of dtype {value.dtype}"
    supported = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, Entry)
    if isinstance(value, supported) or is_value(value) or framework_of(value) is not None:
        return ""
    return type(value).__name__


def _unsupported_blocks(u: UnevenArray) -> str:
    """Why an array in blocks of unequal sizes cannot be in a checkpoint; empty if it can."""
    if not isinstance(u.array, jax.Array | jax.ShapeDtypeStruct):
        return f"an UnevenArray of {type(u.array).__name__}, which must be one of a jax.Array"
    if jax.numpy.issubdtype(u.dtype, jax.dtypes.prng_key):
        return "random keys in blocks of unequal sizes; give iso.full(keys)"
    if len(u.array.shape) != u.ndim:
        return (
            f"an UnevenArray of shape {u.shape} that jax.vmap has made an array of {u.array.shape}"
        )
    if not isinstance(u.array, Tracer) and not isinstance(u.layout, NamedSharding):
        return (
            f"an UnevenArray of shape {u.shape} on no mesh; shard it first: "
            "iso.reshard(u, mesh, spec)"
        )
    return _unsupported(NamedState(u.array))


def nested(group: Group, leaves: Mapping[str, Any]) -> Any:
    """A leaf of the tree from the values of its parts, by full name.

    A module or optimizer becomes dictionaries: of `blocks.0.weight` three.
    """
    if not group.stateful:
        return leaves[group.name]
    tree: dict[str, Any] = {}
    for inner in group.parts:
        *above, last = inner.split(".")
        branch = tree
        for key in above:
            branch = branch.setdefault(key, {})
        branch[last] = leaves[group.full_name(inner)]
    return tree


def is_value(value: Any) -> bool:
    """Whether an object is stored as a value: numbers, strings, None, and sequences of those.

    Example:
        >>> is_value((0.9, None)), is_value(object())
        (True, False)
    """
    if isinstance(value, np.generic):
        return False
    if isinstance(value, _SEQUENCES):
        return all(map(is_value, value))
    return value is None or isinstance(value, VALUES)
