"""Flax and Equinox modules as named arrays, for checkpoints: read, and replaced.

>>> from flax import nnx
>>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
>>> sorted(parts_of(model))
['bias', 'kernel']
>>> filled(model, {"bias": jax.numpy.ones(3), "kernel": jax.numpy.zeros((2, 3))}) is model
True
>>> model.bias[...].tolist()
[1.0, 1.0, 1.0]
"""

from __future__ import annotations

import sys
from typing import Any

import jax

from isoshard.core.checkpoint.source import NamedState
from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.layout.uneven import is_uneven
from isoshard.jax_bridge.graphs import Skeleton, is_nnx, is_variable, join, split


def parts_of(model: Any) -> dict[str, NamedState]:
    """List what a checkpoint keeps of a module.

    Args:
        model: an NNX object, state or variable, or an Equinox module.

    Returns:
        Its arrays by name, keys and counters of `nnx.Rngs` included; of a variable one, called "".
    """
    _, state = split(model)
    return {name: NamedState(array) for name, array in _named(model, state)}


def filled(model: Any, values: dict[str, Any]) -> Any:
    """Put other arrays into a module.

    Args:
        model: as for `parts_of`.
        values: an array for each of its parts.

    Returns:
        `model` itself, filled; of a state or an Equinox module, which are values, a new one.
    """
    graph, state = split(model)
    named = _named(model, state)
    structure = jax.tree.structure(state, is_leaf=is_uneven)
    state = structure.unflatten([values[name] for name, _ in named])
    if is_nnx(model):
        sys.modules["flax.nnx"].update(model, state)
        return model
    if is_variable(model):
        model.set_value(values[""])
        return model
    joined = join(graph, state)
    if not isinstance(graph, Skeleton):
        return joined
    blocks = iter([values[name] for name, array in named if is_uneven(array)])  # may lie anew
    return jax.tree.map(lambda x: next(blocks) if is_uneven(x) else x, joined, is_leaf=is_uneven)


def _named(model: Any, state: Any) -> list[tuple[str, Any]]:
    """The arrays of a state by name, those in blocks of unequal sizes as they are."""
    leaves = jax.tree.leaves_with_path(state, is_leaf=is_uneven)
    return [("" if is_variable(model) else path_name(path), array) for path, array in leaves]
