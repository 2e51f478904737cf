"""NNX objects as a graph and a state; any other pytree is its own state.

>>> split({"w": 1.0})
(None, {'w': 1.0})
>>> from flax import nnx
>>> graph, state = split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
>>> sorted(state)
['bias', 'kernel']
>>> join(graph, state).out_features
3

The split keeps shared variables shared: a tied weight is one leaf. Flax is looked at only if the
program has imported it, for without it there are no NNX objects.
"""

from __future__ import annotations

import sys
from typing import Any


def split(model: Any) -> tuple[Any, Any]:
    """Take an NNX object apart.

    Args:
        model: an `nnx.Module`, `nnx.Optimizer`, .. or any pytree.

    Returns:
        The graph (None unless `model` is an NNX object) and the pytree of its arrays.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Pytree):
        return nnx.split(model)
    return None, model


def join(graph: Any, state: Any) -> Any:
    """Undo `split`: a new NNX object around the arrays of `state`, or `state` itself."""
    return state if graph is None else sys.modules["flax.nnx"].merge(graph, state)


def is_random_state(leaf: Any) -> bool:
    """Tell whether a leaf is a key or counter of `nnx.Rngs`, which no plan speaks of."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(leaf, nnx.RngState)


def is_variable(leaf: Any) -> bool:
    """Tell whether a node of a state is an NNX variable, which boxes one array."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(leaf, nnx.Variable)
