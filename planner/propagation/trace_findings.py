"""Assumptions of depth "trace" for a report, and where a plan splits heads.

Tensor parallelism over sixteen devices splits the 1,024 features of eight heads of keys into
sixteen. Where they are viewed as eight heads, each is split in two, and attention needs it unsplit.

>>> import jax, jax.numpy as jnp
>>> from .flat_program import flattened
>>> flat = flattened(jax.make_jaxpr(lambda k: k.reshape(4, 8, 16))(jnp.ones((4, 128))))
>>> layouts = ArrayShardings({"model": 16})
>>> sharding = [layouts.by_id[layouts.of_spec(jax.P(None, "model"), 2)][0], ((), (0, 1, 2), (3,))]
>>> split_heads(flat, layouts, sharding)[0].partition(" at ")[0]
"8 heads of 16 are split over 16 devices ('model')"
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from isoshard.core.kit import human_bytes, line_of

from .dimension_rules import has_rule, primitives
from .factors import ArraySharding, by_factor
from .flat_program import CONSTANT, BodyScope, FlatOp, FlatProgram
from .sharding_propagation import ArrayShardings
from .target_rules import TargetRules

_PLATFORMS = {"tpu": "TPUs", "gpu": "GPUs", "cpu": "CPUs"}


def trace_notes(program: Any, rules: TargetRules, platform: str) -> tuple[str, ...]:
    """The assumptions of depth "trace" for a program.

    Example:
        >>> import jax
        >>> from isoshard.planner.propagation.target_rules import RULES
        >>> for note in trace_notes(jax.make_jaxpr(lambda x: x + 1)(0.0), RULES["cpu"], "cpu"):
        ...     print(note)
        layouts, collectives and memory are modelled from the traced program, by rules of XLA's \
partitioner and of its compiler for CPUs
        terms of a split result are added up by an all-reduce and a slice
        bfloat16 and float16 are computed and sent in float32
    """
    notes = [
        "layouts, collectives and memory are modelled from the traced program, by rules of XLA's "
        f"partitioner and of its compiler for {_PLATFORMS[platform]}",
        "terms of a split result are added up by a reduce-scatter"
        if rules.scatters
        else "terms of a split result are added up by an all-reduce and a slice",
    ]
    if rules.widens:
        names = " and ".join(sorted(rules.widens))
        notes.append(f"{names} are computed and sent in float32")
    occur = primitives(program)
    if "while" in occur:
        notes.append("a while loop is counted as one run")
    if "cond" in occur:
        notes.append("all branches of a condition are counted")
    if unknown := sorted(name for name in occur if not has_rule(name)):
        names = ", ".join(unknown)
        notes.append(f"operands of these are gathered, since no rule is known for them: {names}")
    return tuple(notes)


def limit_note(needed: int, limit: int, left: int) -> str:
    """The assumption about a step that needs more than the target's compiler schedules for."""
    end = "" if left <= limit else f", and {human_bytes(left)} are left"
    return (
        f"the step needs {human_bytes(needed)}, more than the {human_bytes(limit)} that XLA's "
        "compiler for GPUs schedules for: it is assumed to compute again what one kernel makes of "
        f"what is there{end}"
    )


def split_heads(
    flat: FlatProgram, layouts: ArrayShardings, sharding: Sequence[ArraySharding]
) -> tuple[str, ...]:
    """Sentences on heads that are split, one for each kind of heads."""
    lines_of: dict[tuple[int, int, int, tuple[str, ...]], dict[str, None]] = {}
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
                lines_of.setdefault(key, {})[line_of(op.equation)] = None
    return tuple(
        f"{heads} heads of {size} are split over {devices} devices "
        f"({', '.join(map(repr, names))}) at {', '.join(filter(None, lines)) or 'no known line'}: "
        f"{_share_of_head(heads, devices)}, and gathered where an operation reads full heads; a "
        f"number of devices that divides {heads} keeps heads unsplit"
        for (heads, size, devices, names), lines in lines_of.items()
    )


def _share_of_head(heads: int, devices: int) -> str:
    if devices % heads:
        return "some are split"
    return f"each is split in {devices // heads}"


def _ops(scope: BodyScope) -> Iterator[FlatOp]:
    for op in scope.ops:
        yield op
        for body in op.bodies:
            yield from _ops(body)
