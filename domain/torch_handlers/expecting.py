"""Shapes and dtypes of a torch function's results, inferred on `meta` tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

from isoshard.core.kit import ShardingError
from isoshard.torch_bridge.kit import DTypeLike, PyTree, physical_dtype


class Expected:
    """The results of one call, as the function itself would give them.

    Args:
        function: of tensors.
        name: of it, for messages.
        dtypes: of each tensor among the arguments.

    Attributes:
        dtypes: of the results; None until it was called.
    """

    def __init__(self, function: Callable[..., Any], name: str, dtypes: DTypeLike) -> None:
        """See the class."""
        self._function, self._name, self._argument_dtypes = function, name, dtypes
        self.dtypes: list[torch.dtype] | None = None
        self._kind: Any = tuple

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on `meta` tensors."""
        kinds = iter(self._argument_dtypes)

        def meta(leaf: Any) -> Any:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            return torch.empty(tuple(leaf.shape), dtype=next(kinds), device="meta")

        args, kwargs = jax.tree.map(meta, (args, kwargs))
        try:
            with torch.no_grad():
                results = self._function(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            raise ShardingError(
                f"{self._name} does not take these arguments, or cannot be run on meta tensors to "
                f"find out the shapes of its results ({str(error).splitlines()[0]}); in the latter "
                "case register its handler with check=False"
            ) from error
        if isinstance(results, tuple) and type(results) is not tuple:
            self._kind = type(results)
            results = tuple(results)
        leaves = jax.tree.leaves(results)
        self.dtypes = [leaf.dtype for leaf in leaves]
        return jax.tree.map(_shape, results)

    def rebuilt(self, results: PyTree) -> Any:
        """Results in the function's own kind of tuple (`torch.topk` has one)."""
        if self._kind is tuple or not isinstance(results, tuple):
            return results
        named = hasattr(self._kind, "_fields")
        return self._kind(*results) if named else self._kind(results)


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(tuple(leaf.shape), physical_dtype(leaf.dtype))
