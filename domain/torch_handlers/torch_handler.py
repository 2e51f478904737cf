"""A handler written in torch: torch tensors over the blocks that JAX traces, and back.

Inside, torch functions are torch's own: each device computes with its blocks alone, and
communicates by the verbs of `shards`. The derivative of what the handler does is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from isoshard.core.kit import ShardingError, same_carry
from isoshard.domain.handlers.handler_shards import Shards
from isoshard.domain.handlers.verbs import Axes
from isoshard.torch_bridge.kit import (
    ArrayLike,
    DisableTorchFunctionSubclass,
    Leaf,
    PyTree,
    Result,
    Take,
    TorchFunction,
    recorded,
    scan,
    wrap,
)


class TorchShards(Shards):
    """`iso.domain.Shards` with torch tensors, for a handler in torch.

    Numbers and masks are tensors (int64, bool), and every verb takes and returns tensors, or trees
    of them, of the same dtypes.
    """

    def __init__(self, shards: Shards, blocks: dict[tuple[Any, ...], Any]) -> None:
        """Store the shardings."""
        super().__init__(shards.mesh, shards._layouts, blocks)
        self._jax = shards

    def index(self, axes: Axes) -> Any:
        """The index of this device, so of its block, along mesh axes: int64[]."""
        return wrap(self._jax.index(axes), torch.int64)

    def size(self, arg: ArrayLike, dim: int) -> Any:
        """How many rows of this device's block are valid: int64[]."""
        return wrap(self._jax.size(self._key(arg), dim), torch.int64)

    def start(self, arg: ArrayLike, dim: int) -> Any:
        """The global index of the first row of this device's block: int64[]."""
        return wrap(self._jax.start(self._key(arg), dim), torch.int64)

    def valid(self, arg: ArrayLike, dim: int) -> Any:
        """Which rows of this device's block are data: bool[rows]; the others are zero."""
        return wrap(self._jax.valid(self._key(arg), dim))

    def all_reduce(self, x: Leaf, axes: Axes, op: str = "sum") -> Any:
        """As `Shards.all_reduce`."""
        return _communicated("all_reduce", lambda x: self._jax.all_reduce(x, axes, op), x)

    def all_gather(self, x: Leaf, axes: Axes, axis: int = 0) -> Any:
        """As `Shards.all_gather`."""
        return _communicated("all_gather", lambda x: self._jax.all_gather(x, axes, axis), x)

    def permute(self, x: Leaf, axes: Axes, hop: int = 1) -> Any:
        """As `Shards.permute`."""
        return _communicated("permute", lambda x: self._jax.permute(x, axes, hop), x)

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
        count, index, step = self.count(axes), self.index(axes), -1 if reverse else 1

        def turn(state: Any, hop: Any) -> Any:
            carry, block = state
            coming = self.permute(block, axes, step)
            new_carry = body(carry, block, (index - step * hop) % count)
            return (same_carry(new_carry, carry, _form), coming), None

        hops = torch.arange(count, device="jax")
        (carry, block), _ = scan(turn, (carry, x), hops[:-1]) if count > 1 else ((carry, x), None)
        return turn((carry, block), hops[-1])[0][0]


def in_jax(handler: Callable[..., Any], dtypes: Sequence[torch.dtype]) -> Callable[..., Any]:
    """A handler in torch as one in JAX."""

    def run(shards: Shards, *args: Any, **kwargs: Any) -> Any:
        returned: Any = None

        def code(take: Take) -> Any:
            nonlocal returned
            kinds = iter(dtypes)
            leaves, structure = jax.tree.flatten((args, kwargs))
            operands = [
                take(leaf, next(kinds)) if isinstance(leaf, jax.Array) else leaf for leaf in leaves
            ]
            tensors = [leaf for leaf in operands if isinstance(leaf, torch.Tensor)]
            blocks = dict(zip(shards._layouts, tensors, strict=True))
            positional, named = jax.tree.unflatten(structure, operands)
            with DisableTorchFunctionSubclass():
                returned = handler(TorchShards(shards, blocks), *positional, **named)
            return returned[0] if _is_result_pair(returned) else None

        results = recorded(code, None, {}, getattr(handler, "__name__", "a handler"))
        if not _is_result_pair(returned):
            return returned  # the JAX side raises
        return jax.tree.map(_array, results), returned[1]

    return run


def _is_result_pair(returned: Any) -> bool:
    return isinstance(returned, tuple) and len(returned) == 2


def _array(result: Any) -> Any:
    return result.array if isinstance(result, Result) else result


def _form(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"


def _communicated(name: str, verb: Callable[[Any], Any], x: Any) -> Any:
    for leaf in jax.tree.leaves(x):
        if not isinstance(leaf, torch.Tensor):
            raise ShardingError(
                f"shards sends torch tensors and trees of them, and got a "
                f"{type(leaf).__name__}; make it a tensor: torch.tensor(.., device='jax')"
            )
    results = TorchFunction(verb, f"shards.{name}")(x)
    return jax.tree.map(lambda new, old: new.to(old.dtype), results, x)
