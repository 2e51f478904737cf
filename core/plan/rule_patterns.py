"""Patterns: how a plan's rules name leaves and modules.

A pattern is a glob over the whole name (`*` also crosses dots, `?`, `[..]`), or a regular
expression over the whole name after `re:`, of those that end in time (`backtracking`). One that
starts with a comment goes by it in tables:

>>> matches("blocks.*.weight", "blocks.0.mlp.weight"), matches("re:.*[.][qkv]", "a.o")
(True, False)
>>> label("re:(?#column).*[.](?:up|gate)[.].*"), label("*.bias")
('column', '*.bias')
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec as P

from isoshard.core.runtime.caches import cached

from .backtracking import MOST_WAYS, TooManyWays, ways
from .layout_rules import PlanError

SHORTEST = 200
"""Characters of a name that every pattern has to take."""

_WAY_OUT = "write a glob, [ab]* for (?:a|b)*, and .* for what lies between, at most four of them"


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern fits a whole name.

    Raises:
        PlanError: the name is so long that trying could take for ever.
    """
    return matcher(pattern)(name) is not None


@cached(4096)
def matcher(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """What a whole name is matched by; it raises as `matches`."""
    if not pattern.startswith("re:"):
        return re.compile(fnmatch.translate(pattern)).fullmatch  # never goes back
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
                f"{_WAY_OUT}"
            )
        return compiled.fullmatch(name)

    return match


@cached(4096)
def label(pattern: str) -> str:
    """What a pattern is called in tables: its leading comment, or itself."""
    found = re.match(r"re:\(\?#([^)]*)\)", pattern)
    return found[1] if found else pattern


def pairs_of(rules: Any) -> list[tuple[Any, Any]]:
    """The pairs of a list of rules.

    Args:
        rules: a mapping, or pairs, of pattern and what it says.

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
    is_one = isinstance(rules, str | P) or not isinstance(rules, Iterable)
    pairs = () if is_one else tuple(rules)
    if is_one or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        one = rules if isinstance(rules, str | P) else P("x")
        raise PlanError(
            f"rules are a mapping, or pairs, of name patterns and specs, not {rules!r}; one spec "
            f"for every leaf is Plan({{'*': {one!r}}})"
        )
    return [(pattern, said) for pattern, said in pairs]


def check_patterns(patterns: Iterable[Any]) -> None:
    """Check the patterns of one list of rules.

    Args:
        patterns: in order.

    Raises:
        PlanError: one is given twice, is no string, no regular expression, or one that could take
            for ever; all in one message.

    Example:
        >>> check_patterns(["a.*", "re:a[.].*"])
    """
    patterns = list(patterns)
    wrong = [f"{p!r} is no string" for p in patterns if not isinstance(p, str)]
    texts = [p for p in patterns if isinstance(p, str)]
    wrong += [f"{p!r} is given twice" for p in dict.fromkeys(texts) if texts.count(p) > 1]
    for pattern in dict.fromkeys(texts):
        try:
            matcher(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            wrong.append(f"{pattern!r} is no regular expression: {error}")
        except TooManyWays as error:
            wrong.append(f"{pattern!r} could take for ever: {error}; {_WAY_OUT}")
    if wrong:
        raise PlanError(f"the patterns of a plan are names, globs or 're:..': {'; '.join(wrong)}")
