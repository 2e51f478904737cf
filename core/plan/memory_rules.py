"""Memory rules: a plan's memory kinds for optimizer state or parameters, such as on the host.

Patterns are matched with names of parameters, and with those of an optimizer's slots:
`0.mu.dense.kernel` of optax, `state.dense.weight.exp_avg` of torch.

>>> rules = memory_rules({"*.mu.*": "pinned_host"})
>>> memory_for([rules], "0.mu.dense.kernel"), memory_for([rules], "dense.kernel")
('pinned_host', None)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .freezing import Pairs
from .layout_rules import PlanError
from .rule_patterns import check_patterns, label, matches


def memory_rules(mapping: Any) -> Pairs:
    """Check and freeze a mapping, or pairs, of pattern and memory kind.

    Raises:
        PlanError: a pattern is malformed or repeated, or a kind is not a string.
    """
    pairs = mapping.items() if isinstance(mapping, Mapping) else mapping
    rules = Pairs((pattern, kind) for pattern, kind in pairs)
    check_patterns([pattern for pattern, _ in rules])
    wrong = [f"{label(pattern)!r}: {kind!r}" for pattern, kind in rules if type(kind) is not str]
    if wrong:
        raise PlanError(
            f"memory= takes patterns and names of memory kinds, not {', '.join(wrong)}. Write "
            'memory={"*.mu.*": "pinned_host"}; "device" keeps a leaf in device memory.'
        )
    return rules


def memory_for(rules: Iterable[Pairs], name: str) -> str | None:
    """The memory of a leaf by the first pattern that matches, None if none does."""
    return next(
        (kind for pairs in rules for pattern, kind in pairs if matches(pattern, name)), None
    )


def check_used(rules: Iterable[Pairs], names: Iterable[str]) -> None:
    """Raise PlanError for rules that match none of the names of parameters and slots."""
    names = list(names)
    unused = [
        label(pattern)
        for pairs in rules
        for pattern, _ in pairs
        if not any(matches(pattern, name) for name in names)
    ]
    if unused:
        raise PlanError(
            f"memory rules {', '.join(map(repr, unused))} match no parameter and no slot of the "
            f"optimizer; these are {', '.join(names)}."
        )
