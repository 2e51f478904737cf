"""JAX functions taken apart: named weights, named inputs, and a function of nothing but arrays.

>>> import jax.numpy as jnp
>>> def model(params, x, scale):
...     return {"y": x @ params["w"] * scale}
>>> taken = split_function(model, (jnp.ones((4, 8)), jnp.ones(())), params={"w": jnp.ones((8, 2))})
>>> list(taken.weights), list(taken.inputs)
(['w'], ['x', 'scale'])
>>> jax.eval_shape(taken.function, *taken.weights.values(), *taken.inputs.values())["y"]
ShapeDtypeStruct(shape=(4, 2), dtype=float32)
>>> output_names({"y": 1, "hidden": [2, 3]}, taken={"y"})
['hidden.0', 'hidden.1', 'y_1']

An NNX or Equinox module is its own weights. Flax is looked at only if the program has imported it,
for without it there are no modules of its.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from isoshard.core.kit import named_leaves

from ..errors import ModelError

_ARRAYS = (jax.Array, np.ndarray, np.generic)


@dataclasses.dataclass(frozen=True)
class SplitFunction:
    """A function and its arrays.

    Attributes:
        function: takes the weights, then the inputs, all as positional arguments.
        weights: by the name that plans know.
        inputs: arrays or shapes by name: that of the argument, and the path in it.
        model: what a plan resolves: the module, or the weights of a function.
        name: of the function or module, for messages.
    """

    function: Callable[..., Any]
    weights: dict[str, Any]
    inputs: dict[str, Any]
    model: Any
    name: str


def split_function(
    fn: Callable[..., Any],
    args: Sequence[Any],
    params: Any = None,
    kwargs: Mapping[str, Any] | None = None,
) -> SplitFunction:
    """Separate a function from its weights, and its arguments into arrays.

    Raises:
        ModelError: weights are given twice, or have no values; an input is no array; or names
            collide.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    values, call = _weights(fn, params, name)
    structure = jax.tree.structure(tuple(args))
    inputs = _inputs(fn, args, skip=0 if params is None else 1)
    wrong = [f"input {n!r}: a {type(x).__name__}" for n, x in inputs if not _has_shape(x)]
    wrong += [f"weight {n!r} has no values" for n, x in values if not isinstance(x, _ARRAYS)]
    names = [n for n, _ in (*values, *inputs)]
    wrong += [
        f"{n!r} is the name of several arrays" for n in sorted(set(names)) if names.count(n) > 1
    ]
    if wrong:
        raise ModelError(
            f"{name} is exported with arrays by name; numbers and flags go into kwargs: "
            + "; ".join(wrong)
        )
    count, keywords = len(values), dict(kwargs or {})

    def function(*arrays: Any) -> Any:
        args_ = jax.tree.unflatten(structure, arrays[count:])
        return call(arrays[:count], *args_, **keywords)

    model = fn if params is None else {"params": params} if _has_shape(params) else params
    return SplitFunction(function, dict(values), dict(inputs), model, name)


def output_names(results: Any, taken: Collection[str]) -> list[str]:
    """Name the results of a function: by their paths, "output" if there is one."""
    used, names = set(taken), []
    for path, _ in named_leaves(results):
        name = stem = path if path and not path[0].isdigit() else f"output{'_' * bool(path)}{path}"
        count = 0
        while name in used:
            count += 1
            name = f"{stem}_{count}"
        used.add(name)
        names.append(name)
    return names


def _weights(
    fn: Callable[..., Any], params: Any, name: str
) -> tuple[list[tuple[str, Any]], Callable[..., Any]]:
    """Named weights, and how to call the function with others in their place."""
    nnx = sys.modules.get("flax.nnx")
    is_nnx = nnx is not None and isinstance(fn, nnx.Pytree)
    leaves, structure = jax.tree.flatten(fn)
    array_indices = [at for at, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]
    if (is_nnx or array_indices) and params is not None:
        raise ModelError(f"{name} has weights of its own: export it without params")
    if is_nnx:
        return _nnx_weights(fn, nnx, name)
    if array_indices:

        def call_module(arrays: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            by_index = dict(zip(array_indices, arrays, strict=True))
            filled_leaves = [by_index.get(at, leaf) for at, leaf in enumerate(leaves)]
            return jax.tree.unflatten(structure, filled_leaves)(*args, **kwargs)

        return [(path, leaf) for path, leaf in named_leaves(fn) if isinstance(leaf, _ARRAYS)], (
            call_module
        )
    tree = jax.tree.structure(params)

    def call(arrays: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        first = () if params is None else (jax.tree.unflatten(tree, arrays),)
        return fn(*first, *args, **kwargs)

    named = [] if params is None else named_leaves(params)
    return [(path or "params", leaf) for path, leaf in named], call


def _nnx_weights(fn: Any, nnx: Any, name: str) -> tuple[list[tuple[str, Any]], Callable[..., Any]]:
    graph, state = nnx.split(fn)
    structure = jax.tree.structure(state)

    def call(arrays: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        module = nnx.merge(graph, jax.tree.unflatten(structure, arrays))
        results = module(*args, **kwargs)
        after = jax.tree.leaves(nnx.split(module)[1])
        changed = len(after) != len(arrays) or any(
            a is not b for a, b in zip(after, arrays, strict=True)
        )
        if changed:
            raise ModelError(
                f"{name} changes its own state when it is called, and a file has none that "
                "changes: call model.eval() first"
            )
        return results

    return named_leaves(state), call


def _inputs(fn: Callable[..., Any], args: Sequence[Any], skip: int) -> list[tuple[str, Any]]:
    try:
        every = inspect.signature(fn).parameters.values()
    except (ValueError, TypeError):  # a function without a signature, such as one written in C
        every = ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameter_names = [parameter.name for parameter in every if parameter.kind in kinds][skip:]
    names = []
    for at, arg in enumerate(args):
        stem = parameter_names[at] if at < len(parameter_names) else f"input_{at}"
        names += [(f"{stem}.{path}" if path else stem, leaf) for path, leaf in named_leaves(arg)]
    return names


def _has_shape(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
