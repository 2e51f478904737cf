"""Routed functions inside `iso.domain.lift`: traced at true shapes, answered on blocks.

There an array in blocks is traced at its global shape, without a sharding. So the caller declares
it (`Routed.over`), the call is recorded as one, and where the lifted function is computed on blocks
the handler gets them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from isoshard.core.kit import UnevenError, in_blocks, named_sharding


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
        filled_leaves = [
            next(rest) if is_array else x for x, is_array in zip(leaves, dynamic, strict=True)
        ]
        return jax.tree.unflatten(structure, filled_leaves)

    def unsharded(*arrays: Any) -> Any:
        args, kwargs = filled(arrays)
        return (call if _divide(mesh, specs, args, kwargs) else function)(*args, **kwargs)

    def rule(*operands: Any) -> Any:
        args, kwargs = filled(operands)
        return call(*args, **kwargs)

    arrays = [leaf for leaf, is_array in zip(leaves, dynamic, strict=True) if is_array]
    return in_blocks(unsharded, rule)(*arrays)


def _divide(mesh: Mesh, specs: Any, args: Any, kwargs: Any) -> bool:
    """Whether all arrays divide into equal blocks under the declared specs."""
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
