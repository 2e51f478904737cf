"""Routed functions inside `iso.domain.lift`: traced at true shapes, answered on blocks.

There an array in blocks is traced as a whole one, which does not tell its layout. So the caller
says it (`Routed.over`), the call is recorded as one, and where the lifted function is computed on
blocks the handler gets them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from isoshard.core.errors import UnevenError
from isoshard.core.layout.spec import named_sharding
from isoshard.core.lifting.in_blocks import in_blocks


def in_lift(
    call: Callable[..., Any],
    function: Callable[..., Any],
    mesh: Mesh,
    specs: tuple[Sequence[Any], dict[str, Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Record the call of a routed function."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    dynamic = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]

    def filled(arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rest = iter(arrays)
        given = [next(rest) if own else x for x, own in zip(leaves, dynamic, strict=True)]
        return jax.tree.unflatten(structure, given)

    def whole(*arrays: Any) -> Any:
        args, kwargs = filled(arrays)
        return (call if _divide(mesh, specs, args, kwargs) else function)(*args, **kwargs)

    def rule(*operands: Any) -> Any:
        args, kwargs = filled(operands)
        return call(*args, **kwargs)

    given = [leaf for leaf, own in zip(leaves, dynamic, strict=True) if own]
    return in_blocks(whole, rule)(*given)


def _divide(mesh: Mesh, specs: Any, args: Any, kwargs: Any) -> bool:
    """Whether all arrays can be in equal blocks as was said."""
    pairs = [*zip(args, specs[0], strict=False)]
    pairs += [(kwargs[key], spec) for key, spec in specs[1].items() if key in kwargs]
    try:
        for argument, spec in pairs:
            for leaf in jax.tree.leaves(argument):
                if isinstance(leaf, jax.Array | np.ndarray):
                    named_sharding(spec, mesh, leaf.ndim, shape=leaf.shape)
    except UnevenError:
        return False
    return True
