"""Which operation of a program computed the first NaN, for `jax_debug_nans`.

JAX looks at the results of a program only. Here the program runs once more, with a flag for each
value in place of its results, and the flags are followed from the results back to an operation
that had none among its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.torch_bridge.engine.recording import random_state
from isoshard.torch_bridge.engine.recording.recipes import RECIPES

from .compile_request import CompileRequest
from .interpreting import interpret, needed
from .padded_blocks import has_blocks
from .plan_lowering import extra_inputs, layouts_in, note_traced, tracing

Compiled = Callable[[CompileRequest, Sequence[jax.Array], Callable[[], jax.stages.Lowered]], Any]
"""Compiles what is lowered for a plan with these inputs."""


def first_nan(
    plan: CompileRequest,
    arrays: Sequence[jax.Array],
    floats: Any,
    words: Any,
    compiled: Compiled,
) -> int | None:
    """The entry that computed the first NaN (or infinity) that the results have.

    Args:
        plan: what was run.
        arrays: its inputs.
        floats: the lifted floats.
        words: the random words.
        compiled: compiles the program that searches.

    Returns:
        Its index; the index of an input's entry if that has one; None where the search is not
        supported (arrays in blocks of unequal sizes, equal layers as loops) or finds none.
    """
    if has_blocks(layouts_in(plan)) or len(arrays) != len(plan.leaves):
        return None
    used = needed(plan.program, plan.live)
    infinities = bool(jax.config.jax_debug_infs)

    def flags(*arguments: Any) -> jax.Array:
        leaves, (scalars, drawn) = arguments[: len(arrays)], arguments[len(arrays) :]
        env = interpret(plan.program, used, leaves, scalars, random_state.keys(drawn), plan.notes)
        return jnp.stack([_flag(env[slot], infinities) for slot in range(len(env))])

    def lower() -> jax.stages.Lowered:
        with tracing(plan, arrays):
            traced = jax.jit(flags, keep_unused=True).trace(*arrays, *extra_inputs(plan))
            note_traced(plan, traced.jaxpr)
            return traced.lower()

    flagged = np.asarray(compiled(plan, arrays, lower)(*arrays, floats, words))
    makers: list[tuple[int, Sequence[int]]] = []
    for index, entry in enumerate(plan.program):
        operation = isinstance(entry[0], int)
        count = RECIPES[entry[0]].count if operation else 1
        makers += [(index, entry[1:] if operation else ())] * count
    slots = [slot for slot in plan.live if flagged[slot]]
    while slots:
        index, operands = makers[slots[0]]
        slots = [slot for slot in operands if flagged[slot]]
        if not slots:
            return index
    return None


def _flag(value: Any, infinities: bool) -> jax.Array:
    if value is None or not jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.zeros((), bool)
    return (~jnp.isfinite(value) if infinities else jnp.isnan(value)).any()
