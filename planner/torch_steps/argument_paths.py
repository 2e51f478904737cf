"""Names for the arrays of a call: by argument, and by path in nested ones."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import pytree


def argument_paths(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Each leaf of the arguments by the name of its argument and its path in it.

    Args:
        step: what is called.
        args: its arguments.
        kwargs: likewise.

    >>> def step(tokens, *rest, labels=None): ...
    >>> argument_paths(step, ({"a": 1, "b": [2]}, 3), {"labels": 4})
    ['tokens.a', 'tokens.b.0', 'rest.0', 'labels']
    """
    function = step.forward if isinstance(step, torch.nn.Module) else step
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):
        bound, known = None, {}
    names: list[str] = []
    if bound is not None:
        for name in bound.arguments:
            if known[name].kind is inspect.Parameter.VAR_POSITIONAL:
                names += [f"{name}.{number}" for number in range(len(bound.arguments[name]))]
            elif known[name].kind in _POSITIONAL and len(names) < len(args):
                names.append(name)
    names += [f"argument{number}" for number in range(len(names), len(args))]
    paths = []
    for name, tree in [*zip(names, args, strict=False), *kwargs.items()]:
        for path, _ in pytree.tree_flatten_with_path(tree)[0]:
            paths.append(".".join([name, *map(key_text, path)]))
    return paths


_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def key_text(key: Any) -> str:
    """One step of a path in nested arguments or results.

    Args:
        key: torch's.
    """
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
