"""The operations on the tape that a mask of attention comes from, as a jaxpr of its own.

An attention of long sequences computes its mask tile by tile (`core/nn/tiled_mask.py`), and for
that needs to know how the mask was computed. The operations are followed back while their results
have as many elements as queries by keys; what is smaller is an argument. XLA removes the mask that
is computed as an array if nothing else reads it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax

from isoshard.torch_bridge.lowerings.tiled_masks import Origin, origins

from .ordered_indices import ordered_read

_ATTENTION = "aten::_scaled_dot_product_"


class MaskOrigins:
    """Programs of masks among the values of a tape.

    Args:
        env: the value of each slot so far.
        makers: what made each of them: recipe, entry and the lifted floats, or None for an input.
    """

    def __init__(self, env: Sequence[Any], makers: Sequence[Any]):
        """See the class."""
        self._env, self._makers = env, makers
        self._origins: dict[int, Origin | None] = {}
        self._constant: dict[int, bool] = {}

    def of_entry(self, recipe: Any, entry: Sequence[int]) -> contextlib.AbstractContextManager[Any]:
        """Context in which the lowering of an entry reads the origins of its operands."""
        if not recipe.name.startswith(_ATTENTION):
            return contextlib.nullcontext()

        def origin_of(array: Any) -> Origin | None:
            slot = next((slot for slot in entry[1:] if self._env[slot] is array), None)
            return None if slot is None else self._origin(slot)

        return origins(origin_of)

    def _origin(self, slot: int) -> Origin | None:
        if slot not in self._origins:
            self._origins[slot] = self._traced(slot)
        return self._origins[slot]

    def _traced(self, mask: int) -> Origin | None:
        followed = self._followed(mask)
        if not followed:
            return None
        used = (operand for slot in followed for operand in self._makers[slot][1][1:])
        arguments = sorted(slot for slot in {*used} if slot not in followed)
        floats = [value for slot in followed for value in self._floats(slot)]

        def origin(values: Sequence[Any], floats: Sequence[Any]) -> Any:
            env, rest = dict(zip(arguments, values, strict=True)), iter(floats)
            for slot in sorted(followed):
                recipe, entry = self._makers[slot][:2]
                own = [next(rest) for _ in range(recipe.lifted)]
                operands = [env[operand] for operand in entry[1:]]
                env[slot] = ordered_read(recipe, entry, operands, self._makers)
                if env[slot] is None:
                    (env[slot],) = recipe.run(operands, own, None)
            return env[mask]

        values = [self._env[slot] for slot in arguments]
        with jax.enable_x64(True):  # as operations of the tape, not as the attention's lowering
            return jax.make_jaxpr(origin)(values, floats), [*values, *floats]

    def _followed(self, mask: int) -> list[int]:
        """The slots whose operations are followed, in order."""
        least = math.prod(self._env[mask].shape[-2:])
        followed, pending = set[int](), [mask]
        while pending:
            slot = pending.pop()
            maker = self._makers[slot]
            if slot in followed or maker is None or not _is_followed(*maker):
                continue
            if self._env[slot].size < least and not self._is_constant(slot):
                continue
            followed.add(slot)
            pending += maker[1][1:]
        return sorted(followed)

    def _is_constant(self, slot: int) -> bool:
        """Whether a value depends on no input, as positions do."""
        if slot not in self._constant:
            maker = self._makers[slot]
            self._constant[slot] = (
                maker is not None
                and _is_followed(*maker)
                and all(self._is_constant(operand) for operand in maker[1][1:])
            )
        return self._constant[slot]

    def _floats(self, slot: int) -> Sequence[Any]:
        maker = self._makers[slot]
        return maker[2] if len(maker) > 2 else ()


def _is_followed(recipe: Any, _entry: Any, *floats: Any) -> bool:
    """Whether an operation can be computed again by tiles; templates lack its `floats`."""
    return (
        recipe.count == 1 and not recipe.random and bool(floats) and recipe.name != "mark_sharding"
    )
