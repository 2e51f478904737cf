"""Rules: what each primitive does with operands in blocks."""

if __name__ != "isoshard.core.lifting.rules":
    raise ImportError(f"import isoshard.core.lifting.rules, not {__name__}")

from . import (
    call_rules,
    elementwise_rules,
    indexing_rules,
    loop_rules,
    movement_rules,
    ordering_rules,
    reduction_rules,
    shape_rules,
)

__all__ = [
    "call_rules",
    "elementwise_rules",
    "indexing_rules",
    "loop_rules",
    "movement_rules",
    "ordering_rules",
    "reduction_rules",
    "shape_rules",
]
