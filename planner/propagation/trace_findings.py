"""What a report says of depth "trace": its assumptions, and where a plan splits heads.

Tensor parallelism over sixteen devices splits the 1,024 features of eight heads of keys into
sixteen. Where they are viewed as eight heads, each is split in two, and attention needs it unsplit.

>>> import jax, jax.numpy as jnp
>>> from .flat_program import flattened
>>> flat = flattened(jax.make_jaxpr(lambda k: k.reshape(4, 8, 16))(jnp.ones((4, 128))))
>>> layouts = ArrayShardings({"model": 16})
>>> laid = [layouts.known[layouts.of_spec(jax.P(None, "model"), 2)][0], ((), (0, 1, 2), (3,))]
>>> split_heads(flat, layouts, laid)[0].partition(" at ")[0]
"8 heads of 16 are split over 16 devices ('model')"
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from isoshard.core.kit import human_bytes, line_of

from .dimension_rules import is_known, primitives
from .factors import ArraySharding, by_factor
from .flat_program import CONSTANT, BodyScope, FlatOp, FlatProgram
from .sharding_propagation import ArrayShardings
from .target_rules import TargetRules

_PLATFORMS = {"tpu": "TPUs", "gpu": "GPUs", "cpu": "CPUs"}


def trace_notes(program: Any, rules: TargetRules, platform: str) -> tuple[str, ...]:
    """What is modelled, and what is coarse about it.

    Example:
        >>> import jax
        >>> from isoshard.planner.propagation.target_rules import RULES
        >>> for one in trace_notes(jax.make_jaxpr(lambda x: x + 1)(0.0), RULES["cpu"], "cpu"):
        ...     print(one)
        layouts, collectives and memory are modelled from the traced program, by rules of XLA's \
partitioner and of its compiler for CPUs
        terms of a split result are added up by an all-reduce and a slice
        bfloat16 and float16 are computed and sent in float32
    """
    result = [
        "layouts, collectives and memory are modelled from the traced program, by rules of XLA's "
        f"partitioner and of its compiler for {_PLATFORMS[platform]}",
        "terms of a split result are added up by a reduce-scatter"
        if rules.scatters
        else "terms of a split result are added up by an all-reduce and a slice",
    ]
    if rules.widens:
        names = " and ".join(sorted(rules.widens))
        result.append(f"{names} are computed and sent in float32")
    occur = primitives(program)
    if "while" in occur:
        result.append("a while loop is counted as one run")
    if "cond" in occur:
        result.append("all branches of a condition are counted")
    if unknown := sorted(one for one in occur if not is_known(one)):
        names = ", ".join(unknown)
        result.append(f"operands of these are gathered, since no rule is known for them: {names}")
    return tuple(result)


def limit_note(needed: int, limit: int, left: int) -> str:
    """Of a step that needs more than the target's compiler schedules for."""
    end = "" if left <= limit else f", and {human_bytes(left)} are left"
    return (
        f"the step needs {human_bytes(needed)}, more than the {human_bytes(limit)} that XLA's "
        "compiler for GPUs schedules for: it is taken to compute again what one kernel makes of "
        f"what is there{end}"
    )


def split_heads(
    flat: FlatProgram, layouts: ArrayShardings, sharding: Sequence[ArraySharding]
) -> tuple[str, ...]:
    """Say where heads are split, each kind of heads once."""
    result: dict[tuple[int, int, int, tuple[str, ...]], dict[str, None]] = {}
    for op in _ops(flat.scope):
        if op.name == "reshape" and op.operands[0] != CONSTANT and op.equation is not None:
            axes = op.rule.operands[0]
            factors = axes[-1] if axes else ()
            if len(factors) < 2:
                continue
            layout = sharding[op.operands[0]]
            sizes, ways = op.rule.sizes, layouts.sizes
            splits, rest = by_factor(axes, layout, sizes, ways)
            if splits.get(factors[-1]) or rest & set(layout[-1]):
                heads = math.prod(sizes[factor] for factor in factors[:-1])
                devices = math.prod(ways[split] for split in layout[-1])
                key = (heads, sizes[factors[-1]], devices, layouts.axes(layout[-1]))
                result.setdefault(key, {})[line_of(op.equation)] = None
    return tuple(
        f"{heads} heads of {size} are split over {devices} devices "
        f"({', '.join(map(repr, names))}) at {', '.join(filter(None, lines)) or 'no known line'}: "
        f"{_parts(heads, devices)}, which are gathered where heads are needed whole; a number of "
        f"devices that divides {heads} keeps them whole"
        for (heads, size, devices, names), lines in result.items()
    )


def _parts(heads: int, devices: int) -> str:
    if devices % heads:
        return "some lie in parts"
    return f"each lies in {devices // heads} parts"


def _ops(scope: BodyScope) -> Iterator[FlatOp]:
    for op in scope.ops:
        yield op
        for body in op.bodies:
            yield from _ops(body)
