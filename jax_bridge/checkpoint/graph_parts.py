"""Flax and Equinox modules as parts: their arrays by name, and new ones in their place.

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

from isoshard.core.checkpoints.source import Part
from isoshard.jax_bridge.graphs import is_nnx, is_variable, join, split
from isoshard.jax_bridge.layout import leaf_names


def parts_of(model: Any) -> dict[str, Part]:
    """List what a checkpoint keeps of a module.

    Args:
        model: an NNX object, state or variable, or an Equinox module.

    Returns:
        Its arrays by name, keys and counters of `nnx.Rngs` included; of a variable one, called "".
    """
    _, state = split(model)
    named = zip(leaf_names(state), jax.tree.leaves(state), strict=True)
    return {"" if is_variable(model) else name: Part(array) for (name, _), array in named}


def filled(model: Any, values: dict[str, Any]) -> Any:
    """Put other arrays into a module.

    Args:
        model: as for `parts_of`.
        values: an array for each of its parts.

    Returns:
        `model` itself, filled; of a state or an Equinox module, which are values, a new one.
    """
    graph, state = split(model)
    names = [""] if is_variable(model) else [name for name, _ in leaf_names(state)]
    state = jax.tree.structure(state).unflatten([values[name] for name in names])
    if is_nnx(model):
        sys.modules["flax.nnx"].update(model, state)
        return model
    if is_variable(model):
        model.set_value(values[""])
        return model
    return join(graph, state)
