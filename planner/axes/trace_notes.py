"""What a depth "trace" of a step stands on, in words: for its report."""

from __future__ import annotations

from typing import Any

from isoshard.core.runtime.formatting import human_bytes

from .dimension_rules import is_known, primitives
from .target_rules import TargetRules

_PLATFORMS = {"tpu": "TPUs", "gpu": "GPUs", "cpu": "CPUs"}


def trace_notes(program: Any, rules: TargetRules, platform: str) -> tuple[str, ...]:
    """What is modelled, and what is coarse about it.

    Args:
        program: a jaxpr, closed or not.
        rules: that were followed.
        platform: "tpu", "gpu" or "cpu".

    Example:
        >>> import jax
        >>> from isoshard.planner.axes.target_rules import RULES
        >>> for one in trace_notes(jax.make_jaxpr(lambda x: x + 1)(0.0), RULES["cpu"], "cpu"):
        ...     print(one)
        layouts, collectives and memory are modelled from the traced program, by rules of XLA's \
partitioner and of its compiler for CPUs
        terms of a split result are added up by an all-reduce and a slice
        bfloat16 and float16 are computed and sent in float32
    """
    found = [
        "layouts, collectives and memory are modelled from the traced program, by rules of XLA's "
        f"partitioner and of its compiler for {_PLATFORMS[platform]}",
        "terms of a split result are added up by a reduce-scatter"
        if rules.scatters
        else "terms of a split result are added up by an all-reduce and a slice",
    ]
    if rules.widens:
        names = " and ".join(sorted(rules.widens))
        found.append(f"{names} are computed and sent in float32")
    occur = primitives(program)
    if "while" in occur:
        found.append("a while loop is counted as one run")
    if "cond" in occur:
        found.append("all branches of a condition are counted")
    if unknown := sorted(one for one in occur if not is_known(one)):
        names = ", ".join(unknown)
        found.append(f"operands of these are gathered, since no rule is known for them: {names}")
    return tuple(found)


def limit_note(needed: int, limit: int, left: int) -> str:
    """Of a step that needs more than the target's compiler schedules for.

    Args:
        needed: bytes that it needs with nothing computed again.
        limit: bytes that the compiler schedules for.
        left: bytes that it needs with all computed again that can be.
    """
    end = "" if left <= limit else f", and {human_bytes(left)} are left"
    return (
        f"the step needs {human_bytes(needed)}, more than the {human_bytes(limit)} that XLA's "
        "compiler for GPUs schedules for: it is taken to compute again what one kernel makes of "
        f"what is there{end}"
    )
