"""A program and its rolled form on the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from isoshard.core.repeats.rolled_program import Rolled, Stack


def stacked(stacks: Sequence[Stack], values: Sequence[Any]) -> list[Any]:
    """Inputs as a rolled program takes them."""
    return [
        jnp.stack([values[number] for number in one.indices])
        if one.stacked
        else values[one.indices[0]]
        for one in stacks
    ]


def unstacked(stacks: Sequence[Stack], values: Sequence[Any]) -> list[Any]:
    """Results in the order of the original program."""
    found: dict[int, Any] = {}
    for one, value in zip(stacks, values, strict=True):
        rows = value if one.stacked else [value]
        found.update(zip(one.indices, rows, strict=True))
    return [found[number] for number in range(len(found))]


def both(
    program: ClosedJaxpr, rolled: Rolled, inputs: Sequence[Any], *, compiled: bool = False
) -> tuple[list[Any], list[Any]]:
    """The results of a program and of its rolled form."""
    one, other = jaxpr_as_fun(program), jaxpr_as_fun(rolled.program)
    if compiled:
        one, other = jax.jit(one), jax.jit(other)
    results = other(*stacked(rolled.inputs, inputs))
    return list(one(*inputs)), unstacked(rolled.results, results)


def assert_equal(program: ClosedJaxpr, rolled: Rolled, inputs: Sequence[Any], **options: Any):
    """Dtypes, shapes and values of all results are the same, bit by bit."""
    wanted, got = both(program, rolled, inputs, **options)
    assert [(one.shape, one.dtype) for one in got] == [(one.shape, one.dtype) for one in wanted]
    for one, other in zip(got, wanted, strict=True):
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
