"""What loops over layers copy, in addition to what the program computes.

XLA's CPU compiler multiplies whole arrays only. In each iteration it copies a layer's weights out
of their stack before it multiplies them, copies a product into the stack of results, and fills that
stack before the loop. Copies grow with the size of weights and activations, flops with that times
tokens or features. So loops cost a step nothing to speak of if it has thousands of tokens, and half
of its time if it has sixteen.

>>> import jax, jax.numpy as jnp
>>> from isoshard.core.repeats.rolled_program import rolled
>>> def layers(weights, x):
...     for weight in weights:
...         x = jnp.tanh(x @ weight) * 2.0 + 1.0
...     return x
>>> for rows in (16, 4096):
...     x, weights = jnp.ones((rows, 512)), [jnp.ones((512, 512))] * 6
...     found = rolled(jax.make_jaxpr(layers)(weights, x))
...     copies = loop_copies(found, inputs=[found.inputs[0].indices])
...     print(copies.copied, f"{copies.share:.3f}", copies.too_many("cpu") is None)
12582912 1.496 False
12582912 0.006 True
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable, Mapping
from typing import Any

from isoshard.core.repeats.rolled_program import Rolled
from isoshard.core.runtime._jax_internals.jaxpr_classes import Jaxpr, Literal
from isoshard.core.runtime.flops import is_product, program_flops
from isoshard.core.runtime.formatting import human_bytes
from isoshard.core.runtime.jaxprs import jaxprs_inside, opened, scan_counts

FLOPS_A_BYTE = 6.0
"""A byte copied takes as long as so many flops of a step, at most. Processor time with loops less
that without them, for GPT-2 of 256 to 768 features and 32 to 1024 tokens a step on two cores of an
AMD EPYC (Zen 4): from 1 where the weights of all layers fit in cache to 6 where they do not."""

LIMIT = 0.05
"""Loops are to cost at most this part of a step."""

IN_CACHE = 2**20
"""Copies of so many bytes a run fit in a core's cache, and are not counted."""

_MOVED = frozenset(("convert_element_type", "copy", "reshape", "squeeze", "transpose"))
"""Primitives through which a product still reads, or gives, a slice."""


@dataclasses.dataclass(frozen=True)
class LoopCopies:
    """What one run of a program with loops copies and computes.

    Attributes:
        copied: bytes that the same program without loops does not copy.
        flops: of the whole program.
    """

    copied: int
    flops: float

    @property
    def share(self) -> float:
        """The time of the copies by that of the flops."""
        return self.copied * FLOPS_A_BYTE / max(self.flops, 1.0)

    def too_many(self, platform: str) -> str | None:
        """Why there are to be no loops; None if they cost little.

        Args:
            platform: that runs the program. On others than "cpu" slices of stacks are taken as
                free.
        """
        if platform != "cpu" or self.copied <= IN_CACHE or self.share <= LIMIT:
            return None
        return (
            f"loops would copy {human_bytes(self.copied)} a run, which takes as long as "
            f"{self.share:.0%} of its flops (at most {LIMIT:.0%}): with more rows at a time it is "
            'less; repeat="always" takes loops anyway'
        )


def loop_copies(
    loops: Rolled,
    inputs: Container[tuple[int, ...] | None] = (),
    results: Container[tuple[int, ...] | None] = (),
) -> LoopCopies:
    """What a program with loops copies and computes.

    Args:
        loops: the program.
        inputs: stacks that it gets as such; others are stacked from single arrays first.
        results: stacks that are returned as such; others are unstacked.
    """
    program = opened(loops.program)
    copied = sum(_of_loop(eqn) for eqn in program.eqns if eqn.primitive.name == "scan")
    for stack, var in zip(loops.inputs, program.invars, strict=True):
        if stack.stacked and stack.indices not in inputs:
            copied += 2 * _bytes(var)
    for stack, var in zip(loops.results, program.outvars, strict=True):
        if stack.stacked and stack.indices not in results:
            copied += 2 * _bytes(var)
    return LoopCopies(copied, program_flops(program))


def _of_loop(equation: Any) -> int:
    """Bytes that a loop copies in all iterations."""
    body = opened(equation.params["jaxpr"])
    constants, carries = scan_counts(equation.params)
    flow = _Products(set(body.invars[:constants]), body.invars[constants + carries :])
    flow.follow(body, {})
    size = 2 * sum(map(_bytes, flow.multiplied))  # read, and written
    for var in body.outvars[carries:]:
        if not isinstance(var, Literal):
            size += _bytes(var) * (3 if var in flow.inputs else 1)  # filled; read and written
    return size * equation.params["length"]


class _Products:
    """Which slices a body multiplies, and what its products give.

    Args:
        stacks: arrays of which the body takes slices.
        slices: those that it gets.
    """

    def __init__(self, stacks: set[Any], slices: Iterable[Any]):
        """See the class."""
        self._stacks = stacks
        self._slice = {slice_: slice_ for slice_ in slices}
        self.multiplied: dict[Any, None] = {}
        self.inputs: set[Any] = set()

    def follow(self, program: Jaxpr, outer: Mapping[Any, Any]) -> None:
        """Look at equations, and at the programs in them that are called with their operands.

        Args:
            program: the body, or one in it.
            outer: of its inputs, the variables outside.
        """
        for variable, inner in outer.items():
            if not isinstance(inner, Literal) and inner in self._slice:
                self._slice[variable] = self._slice[inner]
        for equation in program.eqns:
            name = equation.primitive.name
            read = [inner for inner in equation.invars if not isinstance(inner, Literal)]
            inside = list(jaxprs_inside(equation.params))
            if inside and len(inside[0].invars) == len(equation.invars):
                self.follow(inside[0], dict(zip(inside[0].invars, equation.invars, strict=True)))
                outputs = [inner for inner in inside[0].outvars if not isinstance(inner, Literal)]
                if not self.inputs.isdisjoint(outputs):
                    self.inputs.update(equation.outvars)
            elif is_product(name):
                self.multiplied.update(
                    (self._slice[inner], None) for inner in read if inner in self._slice
                )
                self.inputs.update(equation.outvars)
            elif name in _MOVED:
                self._slice.update(
                    (equation.outvars[0], self._slice[inner])
                    for inner in read
                    if inner in self._slice
                )
                if not self.inputs.isdisjoint(read):
                    self.inputs.update(equation.outvars)
            elif name == "dynamic_slice" and read and read[0] in self._stacks:
                self._slice[equation.outvars[0]] = equation.outvars[0]


def _bytes(variable: Any) -> int:
    return math.prod(variable.aval.shape) * variable.aval.dtype.itemsize
