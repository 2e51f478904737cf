"""A model split in two: the arrays that are trained, and the rest.

>>> import numpy as np
>>> parts, params, rest = split_parts({"params": {"w": np.ones(2)}, "stats": {"n": np.zeros(2)}})
>>> params, rest
({'params': {'w': array([1., 1.])}, 'stats': {'n': None}}, {'params': {'w': None}, 'stats': {'n': array([0., 0.])}})
>>> join_parts(parts, params, rest)["stats"]["n"]
array([0., 0.])
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import fnmatch
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from isoshard.core.errors import ShardingError
from isoshard.core.layout.leaf_paths import named_leaves

from .graphs import is_nnx, join, split


@dataclasses.dataclass(frozen=True)
class ModelParts:
    """How a model is rebuilt from its two trees of arrays; hashable.

    Attributes:
        graph: all that is no array.
        is_nnx: whether the model is an NNX object.
    """

    graph: Any
    is_nnx: bool


def split_parts(model: Any, wrt: Any = None) -> tuple[ModelParts, Any, Any]:
    """Split a model into trained arrays and the rest.

    Args:
        model: an NNX module, an Equinox module, or a pytree of arrays.
        wrt: what is trained: for NNX a filter, otherwise a glob over the names of leaves. By
            default `nnx.Param`; the collection "params" of a mapping that has one; every array of
            floats.

    Returns:
        How it is rebuilt, the arrays that are trained, and the others.

    Raises:
        ShardingError: nothing would be trained.
    """
    if is_nnx(model):
        nnx = sys.modules["flax.nnx"]
        graph, params, rest = nnx.split(model, nnx.Param if wrt is None else wrt, ...)
        _check_trained(params, [name for name, _ in named_leaves(rest)], wrt)
        return ModelParts(graph, True), params, rest
    graph, state = split(model)
    named = named_leaves(state)
    trained = [_is_trained(name, leaf, state, wrt) for name, leaf in named]
    structure = jax.tree.structure(state)
    params, rest = (
        structure.unflatten(
            leaf if of == part else None for (_, leaf), of in zip(named, trained, strict=True)
        )
        for part in (True, False)
    )
    _check_trained(params, [name for name, _ in named], wrt)
    return ModelParts(graph, False), params, rest


def join_parts(parts: ModelParts, params: Any, rest: Any) -> Any:
    """Undo `split_parts`: a new model around these very arrays."""
    if parts.is_nnx:
        # New variables around the arrays: those of a state may be of another trace.
        return sys.modules["flax.nnx"].merge(parts.graph, params, rest, copy=True)
    state = jax.tree.map(
        lambda a, b: b if a is None else a, params, rest, is_leaf=lambda x: x is None
    )
    return join(parts.graph, state)


def _is_trained(name: str, leaf: Any, state: Any, wrt: Any) -> bool:
    if wrt is not None:
        return fnmatch.fnmatchcase(name, wrt)
    if isinstance(state, Mapping) and "params" in state:
        return name.startswith("params.")
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _check_trained(params: Any, names: list[str], wrt: Any) -> None:
    if not jax.tree.leaves(params):
        raise ShardingError(
            f"wrt={wrt!r} leaves nothing to train; the arrays are {', '.join(names) or 'none'}"
        )


def split_result(result: Any, *, has_aux: bool, mutable: bool) -> tuple[Any, Any, Any]:
    """Split what a loss returned.

    Args:
        result: of the loss.
        has_aux: as for `train_step`.
        mutable: likewise.

    Returns:
        The loss, the new collections and the rest; None for what it does not return.

    Example:
        >>> split_result((1.0, "more"), has_aux=True, mutable=False)
        (1.0, None, 'more')
    """
    if not has_aux and not mutable:
        return result, None, None
    loss, more = result
    if not mutable:
        return loss, None, more
    return (loss, *more) if has_aux else (loss, more, None)
