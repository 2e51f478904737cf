"""The rules of a plan that match slots of an optimizer but no parameter; see `slot_rules`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .rule_patterns import matches

if TYPE_CHECKING:
    from .plan import Plan

_ANY = "\0"
"""A path component that no pattern names."""

_AROUND = [(f"{_ANY}." * depth, "") for depth in range(5)] + [(f"{_ANY}.", f".{_ANY}")]
"""Prefixes and suffixes of a parameter's name in a slot's: up to four components before it in optax
(`0.mu.NAME`; wrappers add more), and one on both sides in torch (`state.NAME.exp_avg`)."""


def slot_rules(factor: Plan, parameters: Sequence[str]) -> list[tuple[str, Any]]:
    """The rules of a factor that match no parameter, and so are for slots if they match any.

    Example:
        >>> from isoshard.core.plan import Plan
        >>> from jax.sharding import PartitionSpec as P
        >>> slot_rules(Plan({"*.w": P("x"), "*mu*": P("x"), "*": None}), ["w"])
        [('*mu*', P('x',))]
    """
    names = [before + name + after for name in parameters for before, after in _AROUND]
    return [rule for rule in factor.rules if not any(matches(rule[0], name) for name in names)]


def deciding_rule(rules: Sequence[tuple[str, Any]], slot: str) -> tuple[str, Any] | None:
    """The first rule that matches a slot."""
    return next((rule for rule in rules if matches(rule[0], slot)), None)
