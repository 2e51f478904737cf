"""Patterns: how a plan's rules name leaves and modules.

A pattern is a glob over the full name (`*` also crosses dots, `?`, `[..]`), or a regular
expression over the full name after `re:`, if its time is bounded (`backtracking`). One that starts
with a comment is called by it in tables:

>>> matches("blocks.*.weight", "blocks.0.mlp.weight"), matches("re:.*[.][qkv]", "a.o")
(True, False)
>>> label("re:(?#column).*[.](?:up|gate)[.].*"), label("*.bias")
('column', '*.bias')
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec as P

from isoshard.core.runtime.caches import cached

from .backtracking import MOST_WAYS, TooManyWays, ways
from .layout_rules import PlanError

if TYPE_CHECKING:
    from .plan import Plan

SHORTEST = 200
"""Every pattern must be safe on names of up to this many characters."""

_FIX = "write a glob, [ab]* for (?:a|b)*, and .* for what is between, at most four of them"

_ANY = "\0"
"""A path component that no pattern names."""

_AROUND = [(f"{_ANY}." * depth, "") for depth in range(5)] + [(f"{_ANY}.", f".{_ANY}")]
"""Prefixes and suffixes of a parameter's name in a slot's: up to four components before it in optax
(`0.mu.NAME`; wrappers add more), and one on both sides in torch (`state.NAME.exp_avg`)."""


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a full name.

    Raises:
        PlanError: the name is so long that matching could take forever.
    """
    return matcher(pattern)(name) is not None


@cached(4096)
def matcher(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """A compiled pattern; calling it raises as `matches` does."""
    if not pattern.startswith("re:"):
        return re.compile(
            fnmatch.translate(pattern)
        ).fullmatch  # globs never backtrack exponentially
    compiled = re.compile(pattern[3:])
    longest = ways(pattern[3:]).longest()
    if longest < SHORTEST:
        raise TooManyWays(
            f"on a name of {SHORTEST} characters it can be tried in more than {MOST_WAYS:,} ways"
        )

    def match(name: str) -> re.Match[str] | None:
        if len(name) > longest:
            raise PlanError(
                f"{pattern!r} could be tried in more than {MOST_WAYS:,} ways on a name of "
                f"{len(name)} characters ({name[:40]!r}..), and is for names of up to {longest}; "
                f"{_FIX}"
            )
        return compiled.fullmatch(name)

    return match


@cached(4096)
def label(pattern: str) -> str:
    """The name of a pattern in tables: its leading comment, or itself."""
    match = re.match(r"re:\(\?#([^)]*)\)", pattern)
    return match[1] if match else pattern


def pairs_of(rules: Any) -> list[tuple[Any, Any]]:
    """The pairs of a list of rules.

    Args:
        rules: a mapping, or pairs, of pattern and spec.

    Raises:
        PlanError: it is neither.

    Example:
        >>> pairs_of({"*.bias": None})
        [('*.bias', None)]
        >>> pairs_of("model")
        Traceback (most recent call last):
            ...
        isoshard.core.plan.layout_rules.PlanError: rules are a mapping, or pairs, of name patterns and specs, not 'model'; one spec for every leaf is Plan({'*': 'model'})
    """  # noqa: E501
    if isinstance(rules, Mapping):
        return list(rules.items())
    is_single_spec = isinstance(rules, str | P) or not isinstance(rules, Iterable)
    pairs = () if is_single_spec else tuple(rules)
    if is_single_spec or not all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs
    ):
        spec = rules if isinstance(rules, str | P) else P("x")
        raise PlanError(
            f"rules are a mapping, or pairs, of name patterns and specs, not {rules!r}; one spec "
            f"for every leaf is Plan({{'*': {spec!r}}})"
        )
    return [(pattern, spec) for pattern, spec in pairs]


def check_patterns(patterns: Iterable[Any]) -> None:
    """Check the patterns of one list of rules.

    Args:
        patterns: in order.

    Raises:
        PlanError: one is repeated, not a string, not a regular expression, or could take forever;
            all in one message.

    Example:
        >>> check_patterns(["a.*", "re:a[.].*"])
    """
    patterns = list(patterns)
    wrong = [f"{p!r} is not a string" for p in patterns if not isinstance(p, str)]
    texts = [p for p in patterns if isinstance(p, str)]
    wrong += [f"{p!r} is repeated" for p in dict.fromkeys(texts) if texts.count(p) > 1]
    for pattern in dict.fromkeys(texts):
        try:
            matcher(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            wrong.append(f"{pattern!r} is not a regular expression: {error}")
        except TooManyWays as error:
            wrong.append(f"{pattern!r} could take forever: {error}; {_FIX}")
    if wrong:
        raise PlanError(f"the patterns of a plan are names, globs or 're:..': {'; '.join(wrong)}")


def slot_rules(factor: Plan, parameters: Sequence[str]) -> list[tuple[str, Any]]:
    """The rules of a factor for slots of an optimizer: those that match no parameter.

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
