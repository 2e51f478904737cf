"""A plan as StableHLO, for the devices and layouts of its inputs.

`traceable` is the plan as a pure function. Inside `tracing` it is traced in 64 bits, with torch's
promotion of dtypes and none of the meshes that the caller has set, and the lowerings know its
layouts; what is traced there can be lowered there. Tracing alone needs no devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from isoshard.core.blocks.block_layout import lay_in_blocks
from isoshard.core.layout import custom_partitioning
from isoshard.core.layout.offload import to_device, to_memory_of
from isoshard.core.runtime import cpu_compiler
from isoshard.torch_bridge.engine.recording import random_state
from isoshard.torch_bridge.engine.recording.recipes import RECIPES
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.common_mesh import refined, refining
from isoshard.torch_bridge.lowerings.program_partition import compiling_for
from isoshard.torch_bridge.lowerings.sequence_split import splitting

from .compile_request import CompileRequest
from .equal_floats import EqualFloats
from .failed_ops import calls_host
from .interpreting import Notes, interpret, needed
from .padded_blocks import has_blocks, in_blocks


def lowered(
    plan: CompileRequest,
    arrays: Sequence[Any],
    equal: EqualFloats | None = None,
    *,
    keep_unused: bool,
) -> jax.stages.Lowered:
    """A plan as StableHLO, not compiled yet.

    Args:
        plan: what to lower.
        arrays: its inputs, or a `jax.ShapeDtypeStruct` for each.
        equal: which lifted floats are one input; None if each is one.
        keep_unused: whether inputs that no result depends on remain arguments.
    """
    with tracing(plan, arrays):
        traced = traced_in(plan, arrays, equal, keep_unused=keep_unused)
        note_traced(plan, traced.jaxpr)
        if plan.calls_host and plan.donated:  # what it raises must not take its inputs along
            function = jax.jit(traceable(plan, equal), keep_unused=keep_unused)
            traced = function.trace(*arrays, *extra_inputs(plan, equal))
        return traced.lower()


def traced_in(
    plan: CompileRequest,
    arrays: Sequence[Any],
    equal: EqualFloats | None = None,
    *,
    keep_unused: bool,
) -> jax.stages.Traced:
    """A plan as a jaxpr; to be called inside `tracing`."""
    function = jax.jit(
        traceable(plan, equal), donate_argnums=donatable(plan), keep_unused=keep_unused
    )
    return function.trace(*arrays, *extra_inputs(plan, equal))


def donatable(plan: CompileRequest) -> tuple[int, ...]:
    """The inputs that a plan's program overwrites; none where its results are checked."""
    return () if plan.settings.checked else plan.donated


@contextlib.contextmanager
def tracing(plan: CompileRequest, arrays: Sequence[Any]) -> Iterator[None]:
    """Context in which a plan is traced, and lowered."""
    named = layouts_in(plan)
    even = [
        sharding_ids.sharding(layout_id)
        for layout_id in named
        if sharding_ids.blocks(layout_id) is None
    ]
    marks, meshes = (
        compiling_for(even, platform_of(plan)),
        custom_partitioning.shardings_of_program(map(sharding_ids.sharding, named)),
    )
    dtypes = jax.numpy_dtype_promotion("standard")
    alone = jax.sharding.use_abstract_mesh(_NO_MESH)  # whatever mesh the caller has set
    wide = jax.enable_x64(True)
    with wide, dtypes, alone, marks, meshes, refining(named), _sequences(plan, arrays):
        yield


def note_traced(plan: CompileRequest, program: Any) -> None:
    """Note in a plan what is known of it once it is traced."""
    plan.calls_host = calls_host(program)
    special = cpu_compiler.options(program, platform_of(plan))
    plan.options = {**plan.settings.compiler_options, **special}


def platform_of(plan: CompileRequest) -> str:
    """Of the devices that a plan's program runs on."""
    named = layouts_in(plan)
    devices = sharding_ids.sharding(named[0]).device_set if named else {jax.devices()[0]}
    return next(iter(devices)).platform


def extra_inputs(
    plan: CompileRequest, equal: EqualFloats | None = None
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The inputs of a plan's program after its leaves: lifted floats and random words."""
    replicated = plan.replicated()  # declared, or XLA may choose another layout than they have
    floats = plan.lifted if equal is None else len(equal.firsts)
    return (
        jax.ShapeDtypeStruct((floats,), np.float64, sharding=replicated),
        jax.ShapeDtypeStruct((plan.draws, 3), np.uint32, sharding=replicated),
    )


def layouts_in(plan: CompileRequest) -> list[int]:
    """The layouts that a plan names: of inputs, results and constraints."""
    layouts = {*plan.placed, *plan.result_layouts, *_marks(plan)} - {sharding_ids.UNPLACED}
    return sorted(layouts)


def _marks(plan: CompileRequest) -> set[int]:
    """The layouts of a plan's constraints."""
    recipes = [RECIPES[entry[0]] for entry in plan.program if isinstance(entry[0], int)]
    return {recipe.detail for recipe in recipes if recipe.name == "mark_sharding"}


def _sequences(
    plan: CompileRequest, arrays: Sequence[Any]
) -> contextlib.AbstractContextManager[None]:
    """Gives the lowerings of attention the layouts of the program."""
    placed = zip(arrays, plan.placed, strict=True)
    inputs = [
        (tuple(x.shape), sharding_ids.sharding(n)) for x, n in placed if n != sharding_ids.UNPLACED
    ]
    return splitting(inputs, map(sharding_ids.sharding, _marks(plan)))


def traceable(plan: CompileRequest, equal: EqualFloats | None = None) -> Any:
    """The plan as a pure function of its leaves, the lifted floats and the random state."""
    inputs = len(plan.leaves)

    def isoshard_step(*arguments: Any) -> list[Any]:
        scalars, words = arguments[inputs:]
        if equal is not None:
            scalars = equal.each(scalars)
        return computed(plan, arguments[:inputs], scalars, random_state.keys(words))

    return in_blocks(isoshard_step, plan) if has_blocks(layouts_in(plan)) else isoshard_step


def computed(
    plan: CompileRequest, leaves: Sequence[Any], scalars: Any, keys: Iterator[Any]
) -> list[Any]:
    """The results of a plan, each in its layout."""
    used = needed(plan.program, plan.live)
    env = interpret(plan.program, used, leaves, scalars, keys, plan.notes)
    results = [to_device(env[slot]) for slot in plan.live]
    notes = (plan.notes or Notes()).of_slots(plan.program, plan.live)
    for index, layout_id in enumerate(plan.result_layouts):
        if layout_id != sharding_ids.UNPLACED:
            with notes.at(index):
                results[index] = constrained(results[index], layout_id)
    return results


def constrained(result: Any, layout_id: int) -> Any:
    """A result in its layout and its memory kind."""
    layout_id = refined(layout_id)
    blocks = lay_in_blocks(result, sharding_ids.computed(layout_id))
    return to_memory_of(blocks, sharding_ids.layout(layout_id))


_NO_MESH = jax.sharding.AbstractMesh((), ())
