"""A handler written in torch: torch tensors over the blocks that JAX traces, and back.

Inside, torch functions are torch's own: each device computes with its blocks alone, and
communicates by the verbs of `shards`. JAX differentiates what the handler does, and a
`torch.autograd.Function` keeps its own backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from isoshard.core.domain.handlers.handler_shards import Shards
from isoshard.core.domain.handlers.verbs import Axes
from isoshard.core.errors import ShardingError
from isoshard.torch_bridge._torch_internals.undocumented import DisableTorchFunctionSubclass
from isoshard.torch_bridge.argument_types import ArrayLike, Leaf, PyTree
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.interop import own_gradients
from isoshard.torch_bridge.interop.convert import unwrap, wrap


class TorchShards(Shards):
    """What a handler in torch knows: `iso.domain.Shards` with torch tensors.

    Numbers and masks are tensors (int64, bool), and every verb takes and gives tensors, or trees
    of them, whose dtypes stay.
    """

    def __init__(self, shards: Shards, blocks: dict[tuple[Any, ...], Any]) -> None:
        """Keep what JAX knows."""
        super().__init__(shards.mesh, shards._layouts, blocks)
        self._jax = shards

    def index(self, axes: Axes) -> Any:
        """The number of this device, so of its block, along mesh axes: int64[]."""
        return wrap(self._jax.index(axes), torch.int64)

    def size(self, arg: ArrayLike, dim: int) -> Any:
        """How many rows of this device's block are valid: int64[]."""
        return wrap(self._jax.size(self._key(arg), dim), torch.int64)

    def start(self, arg: ArrayLike, dim: int) -> Any:
        """The number in the whole of the first row of this device's block: int64[]."""
        return wrap(self._jax.start(self._key(arg), dim), torch.int64)

    def valid(self, arg: ArrayLike, dim: int) -> Any:
        """Which rows of this device's block are data: bool[rows]; the others hold zeros."""
        return wrap(self._jax.valid(self._key(arg), dim))

    def all_reduce(self, x: Leaf, axes: Axes, op: str = "sum") -> Any:
        """As `Shards.all_reduce`."""
        return _through(lambda x: self._jax.all_reduce(x, axes, op), x)

    def all_gather(self, x: Leaf, axes: Axes, axis: int = 0) -> Any:
        """As `Shards.all_gather`."""
        return _through(lambda x: self._jax.all_gather(x, axes, axis), x)

    def permute(self, x: Leaf, axes: Axes, hop: int = 1) -> Any:
        """As `Shards.permute`."""
        return _through(lambda x: self._jax.permute(x, axes, hop), x)

    def ring(
        self,
        x: Leaf,
        body: Callable[[Any, Any, Any], Any],
        axes: Axes,
        *,
        carry: PyTree,
        reverse: bool = False,
    ) -> Any:
        """As `Shards.ring`; `source` is an int64 tensor."""
        blocks, carries = _dtypes(x), _dtypes(carry)

        def visit(carry: Any, block: Any, source: Any) -> Any:
            given = _wrapped(carry, carries), _wrapped(block, blocks)
            return _unwrapped(body(*given, wrap(source, torch.int64)))

        found = self._jax.ring(_unwrapped(x), visit, axes, carry=_unwrapped(carry), reverse=reverse)
        return _wrapped(found, carries)


def in_jax(handler: Callable[..., Any], dtypes: Sequence[torch.dtype]) -> Callable[..., Any]:
    """A handler in torch as one in JAX.

    Args:
        handler: `handler(shards, *args, **kwargs)`, of tensors.
        dtypes: of each array among the arguments.

    Returns:
        The same of arrays.
    """

    def run(shards: Shards, *args: Any, **kwargs: Any) -> Any:
        with (
            tapes.immediately(None, imports=True),
            own_gradients.honoured(),
            torch.no_grad(),
            DisableTorchFunctionSubclass(),
        ):
            kinds = iter(dtypes)
            leaves, structure = jax.tree.flatten((args, kwargs))
            given = [
                wrap(leaf, next(kinds)) if isinstance(leaf, jax.Array) else leaf for leaf in leaves
            ]
            tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
            blocks = dict(zip(shards._layouts, tensors, strict=True))
            args, kwargs = jax.tree.unflatten(structure, given)
            made = handler(TorchShards(shards, blocks), *args, **kwargs)
            if not isinstance(made, tuple) or len(made) != 2:
                return made  # said to be wrong in JAX
            return _unwrapped(made[0]), made[1]

    return run


def _through(verb: Callable[[Any], Any], x: Any) -> Any:
    return _wrapped(verb(_unwrapped(x)), _dtypes(x))


def _unwrapped(x: Any) -> Any:
    return jax.tree.map(unwrap, x)


def _dtypes(x: Any) -> list[torch.dtype]:
    leaves = jax.tree.leaves(x)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise ShardingError(
                f"shards sends torch tensors and trees of them, and was given a "
                f"{type(leaf).__name__}; make it a tensor: torch.tensor(.., device='jax')"
            )
    return [leaf.dtype for leaf in leaves]


def _wrapped(x: Any, dtypes: Sequence[torch.dtype]) -> Any:
    leaves, structure = jax.tree.flatten(x)
    made = [wrap(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    return jax.tree.unflatten(structure, made)
