"""The roles of a JAX step's arguments, inferred from its results.

An argument that is returned with the same structure, shapes and dtypes is state: the step replaces
it. Its leaves are parameters, except those that follow a parameter: whose path ends with the
parameter's and whose shape is the same, like `mu` and `nu` of optax. Other arguments are the
batch. A step that does not return its first argument is no training: that argument is the model,
and no result replaces a part of the batch.

>>> import numpy as np
>>> w = jax.ShapeDtypeStruct((4, 8), np.float32)
>>> arguments = {"params": {"w": w}, "opt": {"mu": {"w": w}}, "x": jax.ShapeDtypeStruct((2,), int)}
>>> result = ({"w": w}, {"mu": {"w": w}}, jax.ShapeDtypeStruct((), np.float32))
>>> replaced(arguments, result)
{'params': 0, 'opt': 1}
>>> for leaf in leaves_of_arguments(arguments, ("x",)):
...     print(leaf.name, leaf.role, leaf.follows)
w parameter None
mu.w optimizer w
x input None
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.layout.leaf_paths import path_name

from .traced_step import Role


class ArgumentLeaf(NamedTuple):
    """An array among the arguments of a step.

    Attributes:
        argument: the name of the argument that it is in.
        name: for a plan: its path in the argument; of a batch with the argument's name.
        role: of the array.
        follows: of optimizer state, the name of its parameter.
        value: with a shape and a dtype.
    """

    argument: str
    name: str
    role: Role
    follows: str | None
    value: Any


def replaced(arguments: Mapping[str, Any], result: Any) -> dict[str, int | None]:
    """The arguments that a step replaces, and their positions in its result.

    Returns:
        For each such argument the index of the child of `result`; None: all of the result.
    """
    children, _ = jax.tree.flatten(result, is_leaf=lambda x: x is not result)
    result_kind = _kind(result)
    free = dict(enumerate(map(_kind, children)))
    replaced_by: dict[str, int | None] = {}
    for name, tree in arguments.items():
        kind = _kind(tree)
        if not kind[1]:
            continue
        if kind == result_kind and not replaced_by:
            return {name: None}
        index = next((index for index, other in free.items() if other == kind), None)
        if index is not None:
            del free[index]
            replaced_by[name] = index
        if not replaced_by:
            return {}
    return replaced_by


def leaves_of_arguments(arguments: Mapping[str, Any], batch: Collection[str]) -> list[ArgumentLeaf]:
    """The arrays of the arguments, with names and roles.

    Args:
        arguments: trees by name, in order.
        batch: names of those that are inputs.
    """
    named = [
        (argument, path, leaf)
        for argument, tree in arguments.items()
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]
    leaves = []
    owners = _owners([entry for entry in named if entry[0] not in batch])
    for argument, path, leaf in named:
        name = path_name(path)
        if argument in batch:
            join = ".".join(filter(None, (argument, name)))
            is_key = jnp.issubdtype(_dtype(leaf), jax.dtypes.prng_key)
            leaves.append(ArgumentLeaf(argument, join, "random" if is_key else "input", None, leaf))
            continue
        owner = owners.get((argument, name))
        role: Role = "parameter" if jnp.issubdtype(_dtype(leaf), jnp.inexact) else "buffer"
        if owner is not None:
            role = "optimizer"
        elif jnp.issubdtype(_dtype(leaf), jax.dtypes.prng_key):
            role = "random"
        elif not np.shape(leaf):
            role = "number"
        leaves.append(ArgumentLeaf(argument, name or argument, role, owner, leaf))
    return leaves


def _owners(named: list[tuple[str, Any, Any]]) -> dict[tuple[str, str], str]:
    """The parameter that each leaf of an optimizer's state follows.

    It is in another argument, or in another field of the argument that has a field for parameters.
    """
    parameters: dict[tuple[str, ...], list[tuple[str, str, str]]] = {}
    positions = []
    for argument, path, leaf in named:
        if not np.shape(leaf):
            continue
        name = path_name(path)
        field, _, rest = name.partition(".")
        inside = field in _FIELDS
        path_text = rest if inside else name
        location = f"{argument}.{field}" if inside else argument
        parameters.setdefault((path_text, *map(str, np.shape(leaf))), []).append(
            (location, argument, name)
        )
        positions.append((argument, field, name, tuple(map(str, np.shape(leaf)))))
    owners: dict[tuple[str, str], str] = {}
    for argument, field, name, shape in positions:
        segments = name.split(".") if name else []
        for start in range(1, len(segments) + 1):
            candidates = parameters.get((".".join(segments[start:]), *shape), ())
            others = [
                parameter
                for location, of, parameter in candidates
                if location not in (argument, f"{argument}.{field}")
            ]
            if others and field not in _FIELDS:
                owners[argument, name] = others[0]
                break
    return owners


_FIELDS = ("params", "parameters", "model", "trainable")
"""Usual names of the field of parameters in a training state."""


def _kind(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((tuple(np.shape(x)), _dtype(x)) for x in leaves)


def _dtype(leaf: Any) -> Any:
    dtype = getattr(leaf, "dtype", None)
    return np.asarray(leaf).dtype if dtype is None else dtype
