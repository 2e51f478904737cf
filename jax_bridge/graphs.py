"""Models as a graph and a state: the state has the arrays, the graph all else.

>>> split({"w": 1.0})
(None, {'w': 1.0})
>>> from flax import nnx
>>> graph, state = split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
>>> sorted(state)
['bias', 'kernel']
>>> join(graph, state).out_features
3

The split of an NNX object keeps shared variables shared: a tied weight is one leaf. Of an Equinox
module, and of any pytree with functions or strings among its leaves, these stay in the graph:

>>> import numpy as np
>>> graph, state = split({"w": np.ones(2), "act": np.tanh})
>>> state
{'act': None, 'w': array([1., 1.])}
>>> join(graph, state)["act"]
<ufunc 'tanh'>

Flax and Equinox are read from `sys.modules`: a program that has not imported them has no objects
of theirs.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import numpy as np

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_NUMBERS = (bool, int, float, complex)
_HOLE = object()


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """A pytree without its arrays.

    Attributes:
        structure: of the whole tree.
        rest: its leaves in order, with holes where the arrays were.
    """

    structure: Any
    rest: tuple[Any, ...]

    def join(self, state: Any) -> Any:
        """Put the arrays of `state` into the holes."""
        arrays = iter(jax.tree.leaves(state))
        return self.structure.unflatten(
            next(arrays) if leaf is _HOLE else leaf for leaf in self.rest
        )


def split(model: Any) -> tuple[Any, Any]:
    """Split a model into a graph and its arrays.

    Args:
        model: an `nnx.Module`, `nnx.Optimizer`, an Equinox module, .. or any pytree.

    Returns:
        The graph (None if `model` is a pytree of arrays and numbers) and the pytree of its arrays.
        Numbers count as arrays, except those in Equinox modules.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Pytree):
        return nnx.split(model)
    leaves, structure = jax.tree.flatten(model)
    is_static = [keep for node in _nodes(model) for keep in _static_leaves(node)]
    if not any(is_static):
        return None, model
    pairs = list(zip(leaves, is_static, strict=True))
    graph = Skeleton(structure, tuple(leaf if keep else _HOLE for leaf, keep in pairs))
    return graph, structure.unflatten(None if keep else leaf for leaf, keep in pairs)


def join(graph: Any, state: Any) -> Any:
    """Undo `split`: a new object around the arrays of `state`, or `state` itself."""
    if graph is None:
        return state
    if isinstance(graph, Skeleton):
        return graph.join(state)
    return sys.modules["flax.nnx"].merge(graph, state)


def is_random_state(leaf: Any) -> bool:
    """Tell whether a leaf is a key or counter of `nnx.Rngs`, which plans do not shard."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(leaf, nnx.RngState)


def is_variable(leaf: Any) -> bool:
    """Tell whether a node of a state is an NNX variable, which boxes one array."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(leaf, nnx.Variable)


def is_nnx(model: Any) -> bool:
    """Tell whether `model` is an NNX module or another NNX object."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Pytree)


def is_equinox(node: Any) -> bool:
    """Tell whether a node of a pytree is an Equinox module."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(node, equinox.Module)


def _nodes(model: Any) -> list[Any]:
    return jax.tree.leaves(model, is_leaf=is_equinox)


def _static_leaves(node: Any) -> list[bool]:
    """For each leaf of a node, whether it is no array and remains in the graph."""
    data = _ARRAYS if is_equinox(node) else _ARRAYS + _NUMBERS
    return [not isinstance(leaf, data) for leaf in jax.tree.leaves(node)]
