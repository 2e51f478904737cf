"""What a plan lets go from slice to slice: kinds of collectives, by mesh axis.

>>> slice_rules({"replica": "all-reduce"})
(('replica', ('all-reduce',)),)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from isoshard.core.runtime.hlo_collectives import KINDS

from .freezing import Pairs
from .layout_rules import PlanError


def slice_rules(given: Any) -> Pairs:
    """Check and freeze a mapping, or pairs, of mesh axis and kinds of collectives.

    Raises:
        PlanError: an axis is no name, or a kind is none of HLO's.
    """
    try:
        pairs = list(given.items() if isinstance(given, Mapping) else given)
        rules = Pairs(
            (axis, (kinds,) if isinstance(kinds, str) else tuple(kinds)) for axis, kinds in pairs
        )
    except (TypeError, ValueError):
        raise PlanError(f"dcn= {_WANTED}, not {given!r}") from None
    wrong = [
        f"{axis!r}: {kinds!r}"
        for axis, kinds in rules
        if not isinstance(axis, str) or not kinds or not set(kinds) <= KINDS.keys()
    ]
    if wrong:
        raise PlanError(f"dcn= {_WANTED}; {', '.join(wrong)} is none. Kinds: {', '.join(KINDS)}.")
    return rules


_WANTED = (
    "takes mesh axes and the kinds of collectives that may go from slice to slice along them, "
    'such as {"replica": "all-reduce"}'
)


def over_dcn(rules: Iterable[Pairs]) -> dict[str, tuple[str, ...]]:
    """The kinds by axis that any of several plans allows."""
    found: dict[str, tuple[str, ...]] = {}
    for axis, kinds in (pair for pairs in rules for pair in pairs):
        found[axis] = tuple(dict.fromkeys((*found.get(axis, ()), *kinds)))
    return found
