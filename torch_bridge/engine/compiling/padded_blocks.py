"""Programs on tensors in blocks of unequal sizes.

A tape is recorded at true shapes, without blocks. Where the layout of an input, a
constraint or a result is a `BlockLayout`, the program is what `iso.domain.lift` makes of it:
traced at the true shapes, computed on the padded arrays. Compiled, it takes and gives those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.layout.uneven import UnevenArray, padded_of
from isoshard.core.lifting.lifting import lift
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.common_mesh import refined

if TYPE_CHECKING:
    from .compile_request import Blocks, CompileRequest


def has_blocks(layout_ids: Iterable[int]) -> bool:
    """Whether one of these layouts is in blocks with padding."""
    return any(sharding_ids.blocks(layout_id) is not None for layout_id in layout_ids)


def in_blocks(
    step: Callable[..., list[jax.Array]], plan: CompileRequest
) -> Callable[..., list[jax.Array]]:
    """A program of padded arrays.

    Args:
        step: the program at the true shapes; its arguments are the plan's inputs and some more.
        plan: has the layouts of the inputs. Its `blocks` are set whenever the function is traced.
    """
    lifted = lift(step)

    def isoshard_step(*arguments: Any) -> list[Any]:
        count = len(plan.placed)
        inputs = [_entered(x, n) for x, n in zip(arguments[:count], plan.placed, strict=True)]
        results = lifted(*inputs, *arguments[count:])
        plan.blocks = tuple(
            BlockLayout.of(result) if isinstance(result, UnevenArray) else None
            for result in results
        )
        return padded(results)

    return isoshard_step


def _entered(array: Any, layout_id: int) -> Any:
    blocks = sharding_ids.blocks(refined(layout_id))
    return array if blocks is None else blocks.wrap(array)


def padded(arrays: Sequence[Any]) -> list[Any]:
    """The JAX arrays of some values: of those in blocks, the padded ones."""
    return list(map(padded_of, arrays))


def wrapped(results: Sequence[jax.Array], blocks: Blocks) -> Sequence[Any]:
    """What a compiled program gave, with what is known of padding."""
    if not any(blocks):
        return results
    return [
        array if block is None else block.wrap(array)
        for array, block in zip(results, blocks, strict=True)
    ]
