"""Slice rules: the kinds of collectives that may cross slices, by mesh axis.

>>> slice_rules({"replica": "all-reduce"})
(('replica', ('all-reduce',)),)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from isoshard.core.runtime.hlo_collectives import KINDS

from .freezing import Pairs
from .layout_rules import PlanError


def slice_rules(mapping: Any) -> Pairs:
    """Check and freeze a mapping, or pairs, of mesh axis and kinds of collectives.

    Raises:
        PlanError: an axis is not a string, or a kind is none of HLO's.
    """
    try:
        pairs = list(mapping.items() if isinstance(mapping, Mapping) else mapping)
        rules = Pairs(
            (axis, (kinds,) if isinstance(kinds, str) else tuple(kinds)) for axis, kinds in pairs
        )
    except (TypeError, ValueError):
        raise PlanError(f"dcn= {_EXPECTED}, not {mapping!r}") from None
    wrong = [
        f"{axis!r}: {kinds!r}"
        for axis, kinds in rules
        if not isinstance(axis, str) or not kinds or not set(kinds) <= KINDS.keys()
    ]
    if wrong:
        raise PlanError(f"dcn= {_EXPECTED}, not {', '.join(wrong)}. Kinds: {', '.join(KINDS)}.")
    return rules


_EXPECTED = (
    "takes mesh axes and the kinds of collectives that may cross slices over them, "
    'such as {"replica": "all-reduce"}'
)


def over_dcn(rules: Iterable[Pairs]) -> dict[str, tuple[str, ...]]:
    """The kinds by axis that any of several plans allows."""
    kinds_by_axis: dict[str, tuple[str, ...]] = {}
    for axis, kinds in (pair for pairs in rules for pair in pairs):
        kinds_by_axis[axis] = tuple(dict.fromkeys((*kinds_by_axis.get(axis, ()), *kinds)))
    return kinds_by_axis
