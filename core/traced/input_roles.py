"""What the arguments of a JAX step are for, told from what the step gives back.

An argument that comes back with the same structure, shapes and dtypes is state: the step replaces
it. Its leaves are parameters, but for those that follow a parameter: whose path ends as the
parameter's and whose shape is the same, as `mu` and `nu` of optax do. Other arguments are the
batch. A step that does not give its first argument back is no training: that one is the model, and
a result that looks like a part of the batch renews nothing.

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
    """One array among the arguments of a step.

    Attributes:
        argument: the name of the argument that it is in.
        name: as a plan knows it: its path in the argument; of a batch with the argument's name.
        role: what it is for.
        follows: of optimizer state, the name of its parameter.
        value: as it was given; it has a shape and a dtype.
    """

    argument: str
    name: str
    role: Role
    follows: str | None
    value: Any


def replaced(arguments: Mapping[str, Any], result: Any) -> dict[str, int | None]:
    """Which arguments a step gives back anew, and at which place of its result.

    Returns:
        For each such argument the place of the child of `result`; None: all of the result.
    """
    children, _ = jax.tree.flatten(result, is_leaf=lambda x: x is not result)
    result_kind = _kind(result)
    free = dict(enumerate(map(_kind, children)))
    found: dict[str, int | None] = {}
    for name, tree in arguments.items():
        kind = _kind(tree)
        if not kind[1]:
            continue
        if kind == result_kind and not found:
            return {name: None}
        index = next((index for index, other in free.items() if other == kind), None)
        if index is not None:
            del free[index]
            found[name] = index
        if not found:
            return {}
    return found


def leaves_of_arguments(arguments: Mapping[str, Any], batch: Collection[str]) -> list[ArgumentLeaf]:
    """Name every array of the arguments, and say what it is for.

    Args:
        arguments: trees by name, in order.
        batch: names of those that are inputs.
    """
    named = [
        (argument, path, leaf)
        for argument, tree in arguments.items()
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]
    found = []
    owners = _owners([one for one in named if one[0] not in batch])
    for argument, path, leaf in named:
        name = path_name(path)
        if argument in batch:
            join = ".".join(filter(None, (argument, name)))
            is_key = jnp.issubdtype(_dtype(leaf), jax.dtypes.prng_key)
            found.append(ArgumentLeaf(argument, join, "random" if is_key else "input", None, leaf))
            continue
        owner = owners.get((argument, name))
        role: Role = "parameter" if jnp.issubdtype(_dtype(leaf), jnp.inexact) else "buffer"
        if owner is not None:
            role = "optimizer"
        elif jnp.issubdtype(_dtype(leaf), jax.dtypes.prng_key):
            role = "random"
        elif not np.shape(leaf):
            role = "number"
        found.append(ArgumentLeaf(argument, name or argument, role, owner, leaf))
    return found


def _owners(named: list[tuple[str, Any, Any]]) -> dict[tuple[str, str], str]:
    """The parameter that each leaf of an optimizer's state follows.

    It lies in another argument, or in another field of the one that has a field for parameters.
    """
    parameters: dict[tuple[str, ...], list[tuple[str, str, str]]] = {}
    positions = []
    for argument, path, leaf in named:
        if not np.shape(leaf):
            continue
        name = path_name(path)
        field, _, rest = name.partition(".")
        inside = field in _FIELDS
        own = rest if inside else name
        home = f"{argument}.{field}" if inside else argument
        parameters.setdefault((own, *map(str, np.shape(leaf))), []).append((home, argument, name))
        positions.append((argument, field, name, tuple(map(str, np.shape(leaf)))))
    found: dict[tuple[str, str], str] = {}
    for argument, field, name, shape in positions:
        parts = name.split(".") if name else []
        for start in range(1, len(parts) + 1):
            homes = parameters.get((".".join(parts[start:]), *shape), ())
            others = [
                one for home, of, one in homes if home not in (argument, f"{argument}.{field}")
            ]
            if others and field not in _FIELDS:
                found[argument, name] = others[0]
                break
    return found


_FIELDS = ("params", "parameters", "model", "trainable")
"""What a state that holds everything calls the field of its parameters."""


def _kind(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((tuple(np.shape(x)), _dtype(x)) for x in leaves)


def _dtype(leaf: Any) -> Any:
    found = getattr(leaf, "dtype", None)
    return np.asarray(leaf).dtype if found is None else found
