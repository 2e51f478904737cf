"""A traced step with its equal layers as one loop, so that compilers take as long for 80 as for 4.

A parameter of each layer becomes one input with a leading axis over layers that no mesh axis
splits; its name has `*` for the index of the layer. Both steps have the same bytes of inputs on a
device, and the same bytes of each collective (those in a loop once for each iteration).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from isoshard.core.kit import (
    ClosedJaxpr,
    Stack,
    StepInput,
    StepResult,
    TracedStep,
    Var,
    rolled,
    stacked_sharding,
)


def rolled_step(
    step: TracedStep,
    *,
    at_least: int = 3,
    layouts: Callable[[ClosedJaxpr], Mapping[Var, NamedSharding]] | None = None,
) -> TracedStep:
    """The step with loops over equal layers, and with their inputs and results stacked.

    Only inputs of one role and one sharding are stacked; a layer with other shardings remains
    outside of the loop.

    Args:
        step: as traced.
        at_least: how many equal layers become a loop.
        layouts: of the variables of a program; carries and residuals of loops are constrained to
            them.

    Returns:
        A new step; the argument if nothing in it repeats.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
        >>> columns = NamedSharding(mesh, PartitionSpec(None, "model"))
        >>> def step(x, *layers):
        ...     for weight in layers:
        ...         x = jnp.tanh(jnp.dot(x, weight)) * 2.0 - 1.0
        ...     return x
        >>> inputs = [StepInput("x", "input", (4, 4), np.dtype("float32"), columns)] + [
        ...     StepInput(f"{i}.w", "parameter", (4, 4), np.dtype("float32"), columns)
        ...     for i in range(5)
        ... ]
        >>> program = jax.make_jaxpr(step)(*[jnp.ones((4, 4))] * 6)
        >>> traced = TracedStep("f", "jax", program, tuple(inputs), (StepResult("x"),), mesh)
        >>> [(leaf.name, leaf.shape, leaf.sharding.spec) for leaf in rolled_step(traced).inputs]
        [('x', (4, 4), P(None, 'model')), ('*.w', (5, 4, 4), P(None, None, 'model'))]
    """
    result = rolled(
        step.program,
        at_least=at_least,
        labels=[(leaf.role, leaf.sharding) for leaf in step.inputs],
        replaces=[result.replaces for result in step.results],
        layouts=layouts,
    )
    if not result.loops and not result.batched:
        return step
    names = _names(
        [_pattern([step.inputs[index].name for index in s.indices]) for s in result.inputs]
    )
    new_name = {
        step.inputs[index].name: name
        for stack, name in zip(result.inputs, names, strict=True)
        for index in stack.indices
    }
    inputs = [
        _input(step, stack, name, new_name)
        for stack, name in zip(result.inputs, names, strict=True)
    ]
    where = {stack.indices: index for index, stack in enumerate(result.inputs)}
    return dataclasses.replace(
        step,
        program=result.program,
        inputs=tuple(inputs),
        results=_results(step, result.results, where, names),
    )


def _input(step: TracedStep, stack: Stack, name: str, names: dict[str, str]) -> StepInput:
    first = step.inputs[stack.indices[0]]
    if not stack.stacked:
        return first
    return dataclasses.replace(
        first,
        name=name,
        shape=(len(stack.indices), *first.shape),
        sharding=stacked_sharding(first.sharding),
        follows=None if first.follows is None else names.get(first.follows, first.follows),
        layers=tuple([step.inputs[index].name for index in stack.indices]),
    )


def _results(
    step: TracedStep,
    stacks: Sequence[Stack],
    where: dict[tuple[int, ...], int],
    names: Sequence[str],
) -> tuple[StepResult, ...]:
    results = []
    for stack in stacks:
        members = [step.results[index] for index in stack.indices]
        replaced = tuple([-1 if member.replaces is None else member.replaces for member in members])
        index = where.get(replaced)
        if not stack.stacked:
            results.append(dataclasses.replace(members[0], replaces=index))
            continue
        layouts: list[Any] = [member.sharding for member in members]
        layout = layouts[0] if all(layout == layouts[0] for layout in layouts) else None
        name = _pattern([member.name for member in members]) if index is None else names[index]
        results.append(
            StepResult(name, index, None if layout is None else stacked_sharding(layout))
        )
    return tuple(results)


def _pattern(names: Sequence[str]) -> str:
    """One name for several: `*` where they differ."""
    paths = [name.split(".") for name in names]
    if len({len(path) for path in paths}) > 1:
        return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
    columns = zip(*paths, strict=True)
    return ".".join([column[0] if len(set(column)) == 1 else "*" for column in columns])


def _names(patterns: Sequence[str]) -> list[str]:
    """Names without repeats: the second `layers.*.w` is `layers.*.w#2`."""
    visited: dict[str, int] = {}
    names = []
    for pattern in patterns:
        visited[pattern] = visited.get(pattern, 0) + 1
        names.append(pattern if visited[pattern] == 1 else f"{pattern}#{visited[pattern]}")
    return names
